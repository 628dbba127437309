"""The C engine moves to other processors as it is: it compiles there, needs nothing, and gives the same bits."""

from __future__ import annotations

import re
import struct
import subprocess
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from foreseed.engine.native import NativeEngine, accumulate, direction, isa, project, quantise
from foreseed.engine.types import DirectionKind, Directions, Samples
from tests.engine.fuzz.corpus import write_corpus
from tests.engine.programs import lenet5, random_values
from tests.engine.toolchain import ENGINE, FUZZER, HOSTED, NO_VECTORS, ROOT, compile_all, link, need, run

ARM = "gcc-arm-none-eabi libnewlib-arm-none-eabi"
ARM64 = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"


@dataclass(frozen=True)
class Target:
    """A processor, and the tools that build for it."""

    prefix: str
    packages: str
    flags: tuple[str, ...] = ()

    @property
    def compiler(self) -> list[str]:
        need(f"{self.prefix}gcc", self.packages)
        return [f"{self.prefix}gcc", *self.flags]


TARGETS = {
    "cortex-m4": Target(
        "arm-none-eabi-", ARM, ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
    ),
    "cortex-m0": Target("arm-none-eabi-", ARM, ("-mcpu=cortex-m0", "-mthumb")),
    "aarch64": Target("aarch64-linux-gnu-", ARM64, ("-fno-pic",)),
    "armv7": Target(
        "arm-none-eabi-", f"{ARM} qemu-user",
        ("-mcpu=cortex-a7", "-mfloat-abi=hard", "-mfpu=neon-vfpv4", "--specs=rdimon.specs"),
    ),
    "here": Target("", "gcc", ("-fno-pic",)),
}  # fmt: skip
STRICT = ("-Wall", "-Wextra", "-Werror")
# What a compiler calls on its own: the four functions that any C implementation has, and its own helpers.
HELPERS = re.compile(
    r"mem(cpy|move|set|cmp)|__aeabi_\w+|__gnu_thumb1_case_\w+|__(ctz|clz|mul|div|udiv|ashl|lshr)[a-z]*\d|__cpu_model"
)


EVERYWHERE = [
    "cortex-m4 -Os",
    "cortex-m4 -O3",
    "cortex-m0 -Os",
    "aarch64 -Os",
    "aarch64 -O3",
    "armv7 -O3",
    "here -Os",
    "here -O3",
]


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """The prefix of a processor's tools, and the engine compiled for it."""
    name, optimise = request.param.split()
    target, folder = TARGETS[name], tmp_path_factory.mktemp(name)
    return target.prefix, compile_all(target.compiler, ENGINE, folder, optimise, "-fcallgraph-info=su", *STRICT)


@pytest.mark.parametrize("built", EVERYWHERE, indirect=True)
def test_needs_no_library(built: tuple[str, list[Path]]) -> None:
    prefix, objects = built
    symbols = re.findall(r"^\w* +(\w) (\w+)$", run([f"{prefix}nm", *objects]), re.MULTILINE)
    wanted = {name for kind, name in symbols if kind == "U"} - {name for kind, name in symbols if kind != "U"}
    assert "memmove" in wanted
    assert not {name for name in wanted if not HELPERS.fullmatch(name)}


@pytest.mark.parametrize("built", EVERYWHERE, indirect=True)
def test_has_no_globals_to_write(built: tuple[str, list[Path]]) -> None:
    prefix, objects = built
    totals = run([f"{prefix}size", "--totals", *objects]).splitlines()[-1].split()
    text, data, bss = map(int, totals[:3])
    assert text > 10_000
    assert (data, bss) == (0, 0)


def deepest_stacks(objects: list[Path]) -> Callable[[str], int]:
    """How many bytes of stack a function takes with all that it calls, as the compiler tells."""
    graph = "".join(path.with_suffix(".ci").read_text() for path in objects)
    assert "(dynamic" not in graph
    frames = {name: int(size) for name, size in re.findall(r'title: "([^"]+)" label: "[^"]*n(\d+) bytes', graph)}
    calls: dict[str, set[str]] = {name: set() for name in frames}
    # A call through a pointer may reach any of the inner loops.
    loops = {name for name in frames if "isa_plain" in name}
    for caller, callee in re.findall(r'sourcename: "([^"]+)" targetname: "([^"]+)"', graph):
        calls[caller] |= loops if callee == "__indirect_call" else {callee} & frames.keys()

    @cache
    def deepest(name: str) -> int:
        return frames[name] + max((deepest(callee) for callee in calls[name]), default=0)

    return deepest


@pytest.mark.parametrize("built", ["cortex-m4 -Os", "cortex-m0 -Os"], indirect=True)
def test_takes_no_more_stack_than_a_board_has(built: tuple[str, list[Path]]) -> None:
    deepest = deepest_stacks(built[1])
    assert 8_000 < deepest("fs_start") < 9_500
    assert 8_000 < deepest("fs_make_plan") < 9_500
    assert 3_000 < deepest("fs_open") < 4_000
    assert 2_500 < deepest("fs_probe") < 4_000


# ---- running elsewhere ----


@dataclass(frozen=True)
class Machine:
    """A way to run the engine: a compiler, its flags, and the emulator of what it makes."""

    target: str
    emulator: str = ""
    flags: tuple[str, ...] = ()
    optimise: str = "-O2"

    def build(self, sources: list[Path], folder: Path, name: str) -> list[str | Path]:
        if self.emulator:
            need(self.emulator, TARGETS[self.target].packages)
        compiler = TARGETS[self.target].compiler
        objects = compile_all(compiler, sources, folder, self.optimise, *STRICT, *HOSTED, *self.flags)
        binary = link(compiler, objects, folder / name, "-static")
        return [self.emulator, binary] if self.emulator else [binary]


EMULATED_ARM = Machine("aarch64", "qemu-aarch64")
# 32-bit boards (Raspberry Pi 2, or later ones with a 32-bit system): bare, so that the toolchain of Cortex-M serves.
EMULATED_ARM32 = Machine("armv7", "qemu-arm")
MACHINES = {
    "aarch64": EMULATED_ARM, "armv7": EMULATED_ARM32, "here, without vectors": Machine("here", flags=(NO_VECTORS,)),
}  # fmt: skip
FUSED = ["aarch64", "armv7"]


@dataclass(frozen=True)
class Question:
    """A pruned LeNet-5 with values and images, in files for another machine and as objects for this one."""

    folder: Path
    engine: NativeEngine
    values: array[float]
    samples: Samples

    def losses(self, kind: DirectionKind) -> array[float]:
        return self.engine.probe(self.values, self.samples, asked(kind))

    def range_losses(self, kind: DirectionKind) -> array[float]:
        n = len(self.values)
        return self.engine.probe(self.values, self.samples, asked(kind, at=n // 2, size=n // 4))


def asked(kind: DirectionKind, **span: int) -> Directions:
    return Directions(0x0123456789ABCDEF, 4, 9, 6, first=1, step=3, kind=kind, sigma=float(np.float32(0.01)), **span)


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> Question:
    folder, rng = tmp_path_factory.mktemp("question"), np.random.default_rng(3)
    live = [np.flatnonzero(rng.random(layer.n_dense) < 0.3).tolist() for layer in lenet5().layers()]
    program = lenet5(live)
    values = array("f", random_values(program, rng).tobytes())
    shard = rng.integers(0, 256, (5, program.image_bytes + 1), np.uint8)
    shard[:, 0] %= program.classes
    (folder / "program").write_bytes(program.bytes)
    (folder / "values").write_bytes(values.tobytes())
    (folder / "shard").write_bytes(shard.tobytes())
    samples = Samples.records(shard.tobytes(), program.image_bytes)
    return Question(folder, NativeEngine(program, batch=32, directions=4), values, samples)


@dataclass(frozen=True)
class Answer:
    """What a machine printed for one kind of direction, and last of all."""

    losses: array[float]
    range_losses: array[float]
    direction: array[float]
    sum: array[float]
    products: array[float]
    packed: tuple[str, ...]


def numbers(line: str, kind: str) -> array[float]:
    found = array(kind, bytes.fromhex(line))
    found.byteswap()  # hexadecimal digits are written highest first
    return found


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, question: Question, tmp_path_factory: pytest.TempPathFactory
) -> dict[DirectionKind, Answer]:
    folder = tmp_path_factory.mktemp("machine")
    command = MACHINES[request.param].build([*ENGINE, ROOT / "tests/engine/portable/run.c"], folder, "run")
    return ask(command, question, batch=2, lanes=1)


def ask(
    command: list[str | Path], question: Question, batch: int, lanes: int, isa: int = 0
) -> dict[DirectionKind, Answer]:
    files = [question.folder / name for name in ("program", "values", "shard")]
    lines = run([*command, *files, str(batch), str(lanes), str(isa)]).splitlines()
    kinds: tuple[DirectionKind, ...] = ("gaussian", "rademacher")
    return {
        kind: Answer(*(numbers(line, to) for line, to in zip(part, "ddffd", strict=True)), packed=tuple(lines[10:]))
        for kind, part in zip(kinds, (lines[:5], lines[5:10]), strict=True)
    }


@pytest.mark.parametrize("answers", MACHINES, indirect=True)
def test_directions_are_the_same_bits_elsewhere(answers: dict[DirectionKind, Answer]) -> None:
    for kind, answer in answers.items():
        assert answer.direction.tobytes() == direction(asked(kind), 1, 1000, start=77).tobytes()


@pytest.mark.parametrize("answers", MACHINES, indirect=True)
def test_sums_and_products_of_directions_are_the_same_bits_elsewhere(answers: dict[DirectionKind, Answer]) -> None:
    for kind, answer in answers.items():
        total = array("f", bytes(4 * 1000))
        accumulate(total, asked(kind), array("f", [0.5, -1.25, 0.3, 2.0, -0.7, 0.1]))
        assert answer.sum.tobytes() == total.tobytes()
        assert answer.products.tobytes() == project(asked(kind), total).tobytes()


@pytest.mark.parametrize("answers", MACHINES, indirect=True)
def test_packed_loss_differences_are_the_same_bits_elsewhere(answers: dict[DirectionKind, Answer]) -> None:
    expected = []
    for bits in (1, 2, 4, 8):
        scale, codes = quantise(direction(Directions(11, 4, 9, 1), 0, 1000, start=77), bits, 11, 4, 9, bits // 4)
        expected.append(f"{struct.pack('>f', scale).hex()} {bytes(codes).hex()}")
    assert answers["gaussian"].packed == tuple(expected)


@pytest.mark.parametrize("answers", FUSED, indirect=True)
def test_losses_are_the_same_bits_elsewhere(question: Question, answers: dict[DirectionKind, Answer]) -> None:
    assert isa() != "plain", "ARM fuses multiply-adds: run this test on a processor that does so too"
    for kind, answer in answers.items():
        assert answer.losses.tobytes() == question.losses(kind).tobytes()
        assert answer.range_losses.tobytes() == question.range_losses(kind).tobytes()


PLAIN, AVX2, NEON = 1, 2, 4


def test_neon_and_plain_loops_give_the_same_bits_for_every_layout(question: Question, tmp_path: Path) -> None:
    command = EMULATED_ARM.build([*ENGINE, ROOT / "tests/engine/portable/run.c"], tmp_path, "run")
    expected = {kind: question.losses(kind).tobytes() for kind in ("gaussian", "rademacher")}
    for number in (NEON, PLAIN):
        for batch, lanes in ((5, 0), (5, 4), (4, 2), (8, 8), (16, 16)):
            answer = ask(command, question, batch, lanes, number)
            assert {kind: answer[kind].losses.tobytes() for kind in answer} == expected, (number, batch, lanes)


def test_an_instruction_set_of_another_processor_is_refused(question: Question, tmp_path: Path) -> None:
    command = EMULATED_ARM.build([*ENGINE, ROOT / "tests/engine/portable/run.c"], tmp_path, "run")
    files = [question.folder / name for name in ("program", "values", "shard")]
    assert subprocess.run([*command, *files, "1", "1", str(AVX2)], capture_output=True, check=False).returncode == 5


@pytest.mark.parametrize("answers", ["here, without vectors"], indirect=True)
def test_losses_without_fused_multiply_add_agree_to_rounding(
    question: Question, answers: dict[DirectionKind, Answer]
) -> None:
    for kind, answer in answers.items():
        np.testing.assert_allclose(answer.losses, question.losses(kind), rtol=1e-5)


LAYERS = re.findall(r"FS_LAYER_\w+(?= =)", (ROOT / "csrc/foreseed.h").read_text())


def run_without(layers: list[str], question: Question, folder: Path, optimise: str, expected: int = 0) -> list[str]:
    """What an engine that was built without some layers prints; it must end with the status expected."""
    machine = Machine("here", flags=(f"-DFS_WITHOUT={'|'.join(layers)}",), optimise=optimise)
    (command,) = machine.build([*ENGINE, ROOT / "tests/engine/portable/run.c"], folder, "run")
    files = [question.folder / name for name in ("program", "values", "shard")]
    done = subprocess.run([command, *files, "2", "1", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == expected
    return done.stdout.splitlines()


def test_a_build_without_other_layers_gives_the_same_bits(question: Question, tmp_path: Path) -> None:
    others = [name for name in LAYERS if name != "FS_LAYER_POOL"]
    assert len(others) == 18
    lines = run_without(others, question, tmp_path, "-O2")
    assert numbers(lines[0], "d").tobytes() == question.losses("gaussian").tobytes()


def test_a_build_without_a_layer_refuses_programs_that_need_it(question: Question, tmp_path: Path) -> None:
    # Nothing is computed, and without optimisation a compiler takes a third of the time.
    assert run_without(["FS_LAYER_POOL"], question, tmp_path, "-O0", expected=4) == ["status 13, op 0"]


@pytest.mark.slow
def test_random_programs_give_the_same_bits_on_aarch64(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    said = []
    for machine in (Machine("here"), EMULATED_ARM):
        driver = machine.build([*ENGINE, *FUZZER], tmp_path / machine.target, "driver")
        said.append(run([*driver, "run", tmp_path / "corpus", "3", "800"]))
    assert said[0] == said[1]
    assert int(re.search(r"(\d+) run", said[0])[1]) > 200

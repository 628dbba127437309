"""Whatever bytes come as a program, the engine refuses them or runs them inside its buffers.

`fuzz/driver.c` damages valid programs, knowing the format; `fuzz/fuzz_program.c` runs each in buffers of exactly the
promised size, under the address and undefined-behaviour sanitizers, and checks the engine's promises.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreseed.engine.errors import ProgramError
from foreseed.engine.program import Program
from foreseed.engine.reference_check import check_program
from tests.engine.fuzz.corpus import write_corpus
from tests.engine.toolchain import ENGINE, FUZZER, HOSTED, NO_VECTORS, compile_all, link, need, run

pytestmark = pytest.mark.slow

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MUTANTS = "3000"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "programs"
    write_corpus(path)
    return path


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The fuzzer as it runs here, and with the plain loops of other processors."""
    need("gcc", "gcc")
    folder = tmp_path_factory.mktemp("fuzz")
    flags = ("-O1", "-g1", "-Wall", "-Wextra", "-Werror", *SANITIZE, *HOSTED)  # -g1: lines, and no more
    kinds: dict[str, tuple[str, ...]] = {"vectors": (), "plain": (NO_VECTORS,)}
    return {
        name: link(["gcc"], compile_all(["gcc"], [*ENGINE, *FUZZER], folder, *flags, *more), folder / name, *SANITIZE)
        for name, more in kinds.items()
    }


def drive(driver: Path, how: str, corpus: Path, seed: int) -> list[str | Path]:
    return [driver, how, corpus, str(seed), MUTANTS]


@pytest.mark.parametrize("loops", ["vectors", "plain"])
def test_no_program_makes_the_engine_leave_its_buffers(drivers: dict[str, Path], corpus: Path, loops: str) -> None:
    # The engine allocates nothing, so there is no leak to look for.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    said = run(drive(drivers[loops], "run", corpus, seed=1), env=environment)
    refused, too_large, ran = map(int, re.findall(r"(\d+) (?:refused|too large|run)", said))
    assert refused > 1000
    assert ran > 700
    assert too_large < 100


def mutants(driver: Path, corpus: Path) -> Iterator[tuple[bytes, bool]]:
    """Damaged programs, and whether the C engine accepts them."""
    out = corpus.with_name("mutants")
    run(["sh", "-c", '"$@" >"$0"', out, *drive(driver, "emit", corpus, seed=2)])
    data, at = out.read_bytes(), 0
    while at < len(data):
        size, accepted = struct.unpack_from("<IB", data, at)
        yield data[at + 5 : at + 5 + size], bool(accepted)
        at += 5 + size


def numpy_accepts(data: bytes) -> bool:
    try:
        check_program(Program(data))
    except ProgramError:
        return False
    return True


def test_c_and_numpy_accept_the_same_programs(drivers: dict[str, Path], corpus: Path) -> None:
    verdicts = [(accepted, numpy_accepts(data), data) for data, accepted in mutants(drivers["vectors"], corpus)]
    assert sum(accepted for accepted, _, _ in verdicts) > 700
    assert sum(not accepted for accepted, _, _ in verdicts) > 1000
    apart = [(f"C {c}, NumPy {numpy}", data.hex()) for c, numpy, data in verdicts if c != numpy]
    assert not apart, f"{len(apart)} programs divide the engines; the first: {apart[0]}"

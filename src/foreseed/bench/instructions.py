"""How many instructions a probe takes on ARM: time in an emulator means nothing.

On 64 bits in plain C and with NEON; on 32 bits as on a microcontroller, whose processor knows float32 and no float64.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foreseed.bench.cases import Case, make_case
from foreseed.engine._native import lib
from foreseed.engine.errors import ForeseedError
from foreseed.trained.c_folder import engine_sources

_HERE = Path(__file__).with_name("arm")
_FLAGS = ("-std=c99", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_TOOLS = {
    "gcc": "gcc", "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "arm-none-eabi-gcc": "gcc-arm-none-eabi libnewlib-arm-none-eabi", "qemu-aarch64": "qemu-user",
    "qemu-arm": "qemu-user",
}  # fmt: skip


@dataclass(frozen=True)
class _Machine:
    """A processor, its compiler, and how a device with it probes."""

    compiler: tuple[str, ...]
    emulator: str
    images: int
    """Few: an instruction is emulated a hundred times more slowly, and counts do not scatter."""
    batch: int
    directions: int


_ARM64 = _Machine(("aarch64-linux-gnu-gcc", "-O3", "-static"), "qemu-aarch64", images=16, batch=16, directions=4)
# Instructions and float unit of a Cortex-M4; QEMU's user mode has no M profile.
_SMALL = _Machine(
    (
        "arm-none-eabi-gcc", "-Os", "-march=armv7-r", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16",
        "--specs=rdimon.specs",
    ),
    "qemu-arm", images=4, batch=1, directions=1,
)  # fmt: skip
_WAYS = {"plain": (_ARM64, lib.FS_PLAIN), "neon": (_ARM64, lib.FS_NEON), "microcontroller": (_SMALL, lib.FS_PLAIN)}


def bench_instructions(cases: Sequence[str], progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Instructions for each multiply-accumulate of live weights, all of a probe included."""
    for tool, packages in _TOOLS.items():
        if shutil.which(tool) is None:
            raise ForeseedError(f"no {tool} on PATH: install the Debian packages {packages}")
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        plugin = _build_plugin(folder)
        commands = {machine: _build(machine, plugin, folder) for machine in {machine for machine, _ in _WAYS.values()}}
        for case in cases:
            probes, per_mac = {}, {}
            for way, (machine, isa) in _WAYS.items():
                progress(f"{case}, {way}")
                made = make_case(case, machine.images)
                probes[way] = _count(commands[machine], machine, made, folder, isa)
                per_mac[way] = probes[way] / (made.program.macs * machine.images)
            ratio = probes["plain"] / probes["neon"]
            rows.append({"case": case, "instructions": probes, "per_mac": per_mac, "ratio": ratio})
    settings = {
        way: {"images": machine.images, "batch": machine.batch, "directions": machine.directions}
        for way, (machine, _) in _WAYS.items()
    }
    return {"settings": settings, "cases": rows}


def _build_plugin(folder: Path) -> str:
    """What makes an emulator count."""
    version = 1 if int(re.findall(r"version (\d+)", _output(["qemu-arm", "--version"]))[0]) < 9 else 2
    plugin = str(folder / "count.so")
    _output(["gcc", "-shared", "-fPIC", f"-DVERSION={version}", str(_HERE / "count.c"), "-o", plugin])
    return plugin


def _build(machine: _Machine, plugin: str, folder: Path) -> list[str]:
    """The command that runs a probe on an emulated machine and ends with the count of its instructions."""
    probe = str(folder / f"probe-{machine.compiler[0]}")
    sources = engine_sources()
    engine = [str(path) for path in sources if path.suffix == ".c"]
    _output([*machine.compiler, *_FLAGS, f"-I{sources[0].parent}", *engine, str(_HERE / "probe.c"), "-o", probe])
    return [machine.emulator, "-plugin", plugin, probe]


def _count(command: Sequence[str], machine: _Machine, case: Case, folder: Path, isa: int) -> int:
    """Instructions of one probe: what twice as many probes take more, so that starting does not count."""
    files = {"program": case.program.bytes, "values": case.values.tobytes(), "shard": bytes(case.samples.data)}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    paths, together = [str(folder / name) for name in files], machine.directions
    once, twice = (
        int(_output([*command, *paths, str(machine.batch), str(together), str(probes), str(isa)]))
        for probes in (together, 2 * together)
    )
    return (twice - once) // together


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForeseedError(f"{command[0]} failed, so there is nothing to count: {done.stderr.strip()[-500:]}")
    return done.stdout or done.stderr

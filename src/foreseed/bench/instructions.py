"""How many instructions a probe takes on 64-bit ARM, in plain C and with NEON: time in an emulator means nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foreseed.bench.cases import Case, make_case
from foreseed.engine._native import lib
from foreseed.engine.errors import ForeseedError
from foreseed.trained.c_folder import engine_sources

_HERE = Path(__file__).with_name("arm")
_FLAGS = ("-std=c99", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_TOOLS = {
    "gcc": "gcc", "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", "qemu-aarch64": "qemu-user",
}  # fmt: skip
_SETS = {"plain": lib.FS_PLAIN, "neon": lib.FS_NEON}
# Few: an instruction is emulated a hundred times more slowly, and counts do not scatter.
_IMAGES, _BATCH, _DIRECTIONS = 16, 16, 4


def bench_instructions(cases: Sequence[str], progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Instructions for each multiply-accumulate of live weights, all of a probe included."""
    for tool, packages in _TOOLS.items():
        if shutil.which(tool) is None:
            raise ForeseedError(f"no {tool} on PATH: install the Debian packages {packages}")
    rows = []
    with TemporaryDirectory() as folder:
        command = _build(Path(folder))
        for name in cases:
            progress(name)
            case = make_case(name, _IMAGES)
            probes = {chosen: _count(command, case, Path(folder), number) for chosen, number in _SETS.items()}
            macs = case.program.macs * _IMAGES
            rows.append({
                "case": name,
                "instructions": probes,
                "per_mac": {chosen: count / macs for chosen, count in probes.items()},
                "ratio": probes["plain"] / probes["neon"],
            })  # fmt: skip
    return {"images": _IMAGES, "batch": _BATCH, "directions": _DIRECTIONS, "cases": rows}


def _build(folder: Path) -> list[str]:
    """The command that runs a probe on emulated 64-bit ARM and ends with the count of its instructions."""
    version = 1 if int(re.findall(r"version (\d+)", _output(["qemu-aarch64", "--version"]))[0]) < 9 else 2
    plugin, probe = str(folder / "count.so"), str(folder / "probe")
    _output(["gcc", "-shared", "-fPIC", f"-DVERSION={version}", str(_HERE / "count.c"), "-o", plugin])
    sources = engine_sources()
    engine = [str(path) for path in sources if path.suffix == ".c"]
    compiler = ["aarch64-linux-gnu-gcc", *_FLAGS, "-static", f"-I{sources[0].parent}"]
    _output([*compiler, *engine, str(_HERE / "probe.c"), "-o", probe])
    return ["qemu-aarch64", "-plugin", plugin, probe]


def _count(command: Sequence[str], case: Case, folder: Path, number: int) -> int:
    """Instructions of one probe: what twice as many probes take more, so that starting does not count."""
    files = {"program": case.program.bytes, "values": case.values.tobytes(), "shard": bytes(case.samples.data)}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    paths = [str(folder / name) for name in files]
    once, twice = (
        int(_output([*command, *paths, str(_BATCH), str(_DIRECTIONS), str(probes), str(number)]))
        for probes in (_DIRECTIONS, 2 * _DIRECTIONS)
    )
    return (twice - once) // _DIRECTIONS


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForeseedError(f"{command[0]} failed, so there is nothing to count: {done.stderr.strip()[-500:]}")
    return done.stdout or done.stderr

"""Compare the C engine of a commit with the one that lies here: the time of a probe, and whether bits are the same.

.venv/bin/python tools/engines.py HEAD~1 --isa avx2 --cases lenet5-90,resnet20-90

A machine's rates move by a third within hours, so a change of a few percent shows only if both engines take turns in
one process. The shortest time of each counts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from cffi import FFI

from foreseed.bench.cases import CASES, Case, make_case, parse_names
from foreseed.bench.contenders import SIGMA
from foreseed.bench.measure import pinned
from foreseed.engine.errors import ForeseedError

ROOT = Path(__file__).parents[1]
FLAGS = ["-std=c99", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]

Probe = Callable[[], tuple[float, ...]]


class Engine:
    """An engine built from a folder of sources, by whatever header stands there."""

    def __init__(self, sources: Path, built: Path) -> None:
        files = sorted(str(path) for path in sources.glob("*.c"))
        subprocess.run(["gcc", *FLAGS, f"-I{sources}", *files, "-o", str(built)], check=True)
        self._ffi = FFI()
        self._ffi.cdef(re.sub(r"^#.*$", "", (sources / "foreseed.h").read_text(), flags=re.MULTILINE))
        self._lib: Any = self._ffi.dlopen(str(built))

    def prepare(self, case: Case, isa: str, batch: int, directions: int) -> Probe:
        """A function that probes some directions over the images of the case; returns their losses."""
        ffi, lib = self._ffi, self._lib
        number = getattr(lib, f"FS_{isa.upper()}")
        code, values, data = (ffi.from_buffer(x) for x in (case.program.bytes, case.values, case.samples.data))
        program, plan, engine = ffi.new("fs_program *"), ffi.new("fs_plan *"), ffi.new("fs_engine **")
        config = ffi.new("fs_config *", {"batch": batch, "directions": directions, "isa": number})
        _check(lib.fs_open(program, code, len(code)))
        _check(lib.fs_make_plan(program, config, plan))
        memory = ffi.new("uint8_t[]", plan.arena + 64)
        arena = memory + -int(ffi.cast("uintptr_t", memory)) % 64
        _check(lib.fs_start(engine, program, config, arena, plan.arena))
        stride, count = case.program.image_bytes + 1, case.samples.count
        start = ffi.cast("uint8_t *", data)
        samples = ffi.new("fs_samples *", {"images": start + 1, "labels": start, "stride": stride, "count": count})
        wanted = {"seed": 1, "round": 1, "step": 1, "count": directions, "sigma": SIGMA, "isa": number}
        order, losses = ffi.new("fs_directions *", wanted), ffi.new("double[]", directions)
        known = (engine[0], ffi.cast("float *", values), ffi.NULL, samples, order, losses)
        # The loss of the values themselves, where this engine's fs_probe can give it.
        arguments = known + (ffi.NULL,) * (len(ffi.typeof(lib.fs_probe).args) - len(known))
        held = code, program, config, memory, data

        def probe() -> tuple[float, ...]:
            assert held  # what C points to lives as long as this
            _check(lib.fs_probe(*arguments))
            return tuple(losses)

        return probe


def _check(status: int) -> None:
    if status:
        raise ForeseedError(f"the engine answered with status {status}; see fs_status in its header")


def compare(commit: str, options: argparse.Namespace) -> None:
    """Print a line for each case: both times, their ratio, and whether all losses have the same bits."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "csrc"], capture_output=True, check=False)
    if done.returncode:
        raise ForeseedError(f"{commit}: {done.stderr.decode().strip()}; give a commit that has csrc/")
    with TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        before = Engine(Path(folder, "csrc"), Path(folder, "before.so"))
        now = Engine(ROOT / "csrc", Path(folder, "now.so"))
        for name in parse_names(options.cases):
            spec = CASES[name]
            batch, directions = options.batch or spec.batch, options.directions or spec.directions
            case = make_case(name, options.images)
            probes = [engine.prepare(case, options.isa, batch, directions) for engine in (before, now)]
            with pinned(1):
                (old, new), same = _times(probes, options.seconds)
            micro = 1e6 / case.samples.count / directions
            print(
                f"{name}, {options.isa}, batch {batch}, directions {directions}: {old * micro:.2f} and "
                f"{new * micro:.2f} us an image, {old / new:.2f} times as fast, {'the same' if same else 'OTHER'} bits"
            )


def _times(probes: list[Probe], seconds: float) -> tuple[list[float], bool]:
    best, results = [float("inf")] * len(probes), [probe() for probe in probes]
    start = perf_counter()
    while perf_counter() - start < seconds:
        for i, probe in enumerate(probes):
            began = perf_counter()
            probe()
            best[i] = min(best[i], perf_counter() - began)
    return best, all(result == results[0] for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="whose engine to compare with")
    parser.add_argument("--cases", help=f"some of {', '.join(CASES)}; all if not given")
    parser.add_argument("--isa", default="best", choices=("best", "avx512", "avx2", "neon", "plain"))
    parser.add_argument("--batch", type=int, help="images in memory at once; the case's own if not given")
    parser.add_argument("--directions", type=int, help="directions side by side; the case's own if not given")
    parser.add_argument("--images", type=int, default=64, help="images of a probe (default: 64)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing for each case (default: 5)")
    options = parser.parse_args()
    try:
        compare(options.commit, options)
    except ForeseedError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

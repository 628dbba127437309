"""The peak memory of real processes: a device that only goes forward, and one that backpropagates."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import foreseed
from foreseed.engine.errors import ForeseedError
from foreseed.engine.program import Program

_IMAGES, _DIRECTIONS, _SPREAD = 32, 4, 2


class MeterError(ForeseedError):
    """A process that was to be measured and failed."""


def process_peak_bytes(kind: Literal["bp-free", "bp"], program: Program, batch: int = 1) -> int | None:
    """The most memory that a whole device process holds in a round, interpreter and libraries included.

    A fresh process is started and measured. "bp-free": foreseed's device, answering an order with one image in memory
    at a time. "bp": torch, making training steps with momentum on the dense model, with minibatches of `batch` images.
    None where the system does not say (it must have /proc, as Linux does).
    """
    if not Path("/proc/self/status").exists():
        return None
    with TemporaryDirectory() as folder:
        files = {
            "program": program.bytes,
            "values": bytes(4 * program.n_live),
            "shard": bytes(_IMAGES * (1 + program.image_bytes)),
        }
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        paths = [str(Path(folder, name)) for name in files]
        if kind == "bp-free":
            return _peak("foreseed.bench.device_process", _lean_path(), *paths, str(_DIRECTIONS), str(_SPREAD))
        return _peak("foreseed.meter.backprop_device", sys.path, paths[0], str(batch))


def _lean_path() -> list[str]:
    """The folder of what loads the engine: beside foreseed itself a device needs no other."""
    backend = find_spec("_cffi_backend")
    return [] if backend is None or backend.origin is None else [str(Path(backend.origin).parent)]


def _peak(module: str, folders: list[str], *arguments: str) -> int:
    """The bytes that `main` of a module prints, run in a process that has loaded nothing else."""
    path = [str(Path(foreseed.__file__).parents[1]), *folders]
    code = f"import sys; sys.path[:0] = {path!r}; from {module} import main; main()"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MeterError(f"{module}, which was to be measured, failed: {reason}; free memory, or lower the batch")
    return int(done.stdout)

"""The peak memory of real processes: a device that only goes forward, and one that backpropagates."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import foreseed
from foreseed.device.memory import peak_bytes
from foreseed.engine.errors import ForeseedError
from foreseed.engine.program import Program
from foreseed.engine.types import Buffer

_IMAGES, _DIRECTIONS, _SPREAD = 32, 4, 2


class MeterError(ForeseedError):
    """A process that was to be measured and failed."""


def process_peak_bytes(kind: Literal["bp-free", "bp"], program: Program, batch: int = 1, held: int = 0) -> int | None:
    """The most memory that a whole device process holds in a round, interpreter and libraries included.

    A fresh process is started and measured. "bp-free": foreseed's device, answering an order with `batch` images in
    memory at a time. "bp": torch, making training steps with momentum on the dense model, with minibatches of `batch`
    images. Either holds so many more bytes meanwhile.
    None where the system does not say (it must have /proc, as Linux does).
    """
    if kind == "bp-free":
        shard = bytes(_IMAGES * (1 + program.image_bytes))
        values = bytes(4 * program.n_live)
        return device_peak_bytes(program, values, shard, _DIRECTIONS, _SPREAD, batch, held)
    if kind != "bp":
        raise MeterError(f"a process of kind {kind!r} cannot be measured; expected 'bp-free' or 'bp'")
    with TemporaryDirectory() as folder:
        files = {"program": program.bytes}
        return _peak("foreseed.meter.backprop_device", sys.path, folder, files, str(batch), held=held)


def device_peak_bytes(
    program: Program, values: Buffer, shard: Buffer, k: int, spread: int, batch: int = 1, held: int = 0
) -> int | None:
    """The same for a device that answers an order of `k` directions over this shard, `batch` images at a time."""
    files = {"program": program.bytes, "values": values, "shard": shard}
    with TemporaryDirectory() as folder:
        return _peak("foreseed.device.memory", _lean_path(), folder, files, str(k), str(spread), str(batch), held=held)


def bare_peak_bytes() -> int | None:
    """The same for a Python interpreter that does nothing."""
    return _run(f"{inspect.getsource(peak_bytes)}\nprint(peak_bytes())", "python")


def _lean_path() -> list[str]:
    """The folder of what loads the engine: beside foreseed itself a device needs no other."""
    backend = find_spec("_cffi_backend")
    return [] if backend is None or backend.origin is None else [str(Path(backend.origin).parent)]


def _peak(
    module: str, folders: list[str], folder: str, files: dict[str, Buffer], *arguments: str, held: int = 0
) -> int | None:
    """The bytes that `main` of a module prints, run on these files in a process that has loaded nothing else.

    The process holds so many more bytes all the while.
    """
    for name, content in files.items():
        Path(folder, name).write_bytes(content)
    path = [str(Path(foreseed.__file__).parents[1]), *folders]
    # Bytes that are not 0: the system counts no page that was never written.
    code = f"import sys; sys.path[:0] = {path!r}; n = {held}; held = b'x' * n; from {module} import main; main()"
    return _run(code, module, *(str(Path(folder, name)) for name in files), *arguments)


def _run(code: str, what: str, *arguments: str) -> int | None:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MeterError(f"{what}, which was to be measured, failed: {reason}; free memory, or lower the batch")
    return int(done.stdout) or None

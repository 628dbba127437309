"""The peak memory of real processes: a device that only goes forward, and one that backpropagates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import foreseed
from foreseed.engine.errors import ForeseedError
from foreseed.engine.program import Program

_SCRIPTS = {"bp-free": "forward_device.py", "bp": "backprop_device.py"}


class MeterError(ForeseedError):
    """A process that was to be measured and failed."""


def process_peak_bytes(kind: Literal["bp-free", "bp"], program: Program, batch: int) -> int | None:
    """The most memory that a whole device process holds in a round, interpreter and libraries included.

    A fresh process is started and measured: for "bp-free" foreseed's device answering an order, for "bp" torch making
    training steps with momentum on the dense model; both on `batch` images at a time. None where the system does not
    say (it must have /proc, as Linux does).
    """
    if not Path("/proc/self/status").exists():
        return None
    with TemporaryDirectory() as folder:
        _write_inputs(Path(folder), program, 2 * batch)
        # No site packages' start-up code: a device starts lean.
        command = [sys.executable, "-S", "-P", str(Path(__file__).with_name(_SCRIPTS[kind])), folder, str(batch)]
        path = os.pathsep.join([str(Path(foreseed.__file__).parents[1]), *filter(None, sys.path)])
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MeterError(f"the {kind} device that was to be measured failed: {reason}; lower the batch, or free memory")
    return 1024 * int(done.stdout)


def _write_inputs(folder: Path, program: Program, images: int) -> None:
    (folder / "program").write_bytes(program.bytes)
    (folder / "shard").write_bytes(bytes((1 + program.image_bytes) * images))

"""A device pays for what it imports: neither NumPy nor PyTorch comes with the engine or the device's code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def imported_by(statement: str, folder: Path) -> set[str]:
    """The top-level modules of a fresh process after a statement."""
    report = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; {report}"], capture_output=True, text=True, check=True, cwd=folder
    )
    return set(done.stdout.split())


def test_engine_and_device_import_neither_numpy_nor_torch(tmp_path: Path) -> None:
    modules = imported_by("import foreseed.engine, foreseed.device", tmp_path)
    assert "foreseed" in modules
    assert not modules & {"numpy", "torch"}

"""A device pays for what it imports: neither NumPy nor PyTorch comes with the engine or the device's code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def imported_by(statement: str, folder: Path) -> set[str]:
    """The modules that a statement brings into a fresh process."""
    script = f"import sys; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=folder)
    return set(done.stdout.split())


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_engine_and_device_import_neither_numpy_nor_torch(tmp_path: Path) -> None:
    modules = top_level(imported_by("import foreseed.engine, foreseed.device", tmp_path))
    assert "foreseed" in modules
    assert not modules & {"numpy", "torch"}


def test_the_agent_imports_the_standard_library_and_what_a_device_installs_only(tmp_path: Path) -> None:
    start = "from foreseed.device.agent import main; main(['--broker=mqtts://host', '--name=x', '--shard=none'])"
    modules = imported_by(start, tmp_path)
    foreign = top_level(modules) - sys.stdlib_module_names
    assert foreign == {"foreseed", "_cffi_backend", "cbor2", "paho"}
    ours = {".".join(name.split(".")[:2]) for name in modules if name.startswith("foreseed.")}
    assert ours == {"foreseed.engine", "foreseed.wire", "foreseed.transport", "foreseed.device"}


def test_the_agent_does_without_what_costs_megabytes(tmp_path: Path) -> None:
    modules = imported_by("import foreseed.device.agent", tmp_path)
    assert "foreseed.transport.link" in modules
    assert not modules & {"dataclasses", "inspect", "json", "logging", "pathlib", "shutil", "email", "http", "asyncio"}

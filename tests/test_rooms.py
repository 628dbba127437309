"""The import contracts of pyproject.toml hold, and an import that breaks one is caught."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import foreseed

ROOT = Path(__file__).parents[1]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path, module: str = "", line: str = "") -> subprocess.CompletedProcess[str]:
    """Check a copy of the package, with a line more in one of its modules."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "src" / "foreseed", folder / "foreseed", ignore=shutil.ignore_patterns("__pycache__"))
    if module:
        with open(folder / "foreseed" / module, "a") as file:
            file.write(f"\n\ndef _late() -> None:\n    {line}\n")
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_contracts_hold(tmp_path: Path) -> None:
    done = lint(tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("runs/loop.py", "import foreseed.simulate", "Imports go downwards"),
        ("data/sets.py", "import foreseed.models", "Imports go downwards"),
        ("device/probing.py", "import numpy", "A device loads no NumPy"),
        ("wire/messages.py", "import foreseed.draws", "A device loads no NumPy"),
        ("coordinator/robust.py", "import foreseed.transport.link", "do no I/O"),
        ("fleet/devices.py", "import foreseed.simulate", "A real fleet is no simulation"),
    ],
)
def test_an_import_against_them_is_caught(tmp_path: Path, module: str, line: str, broken: str) -> None:
    done = lint(tmp_path, module, line)
    assert done.returncode == 1
    assert any(broken in heading for heading in done.stdout.splitlines() if " BROKEN" in heading), done.stdout


def test_no_function_hides_a_module_of_its_name() -> None:
    names = [info.name for info in pkgutil.walk_packages(foreseed.__path__, "foreseed.") if "__main__" not in info.name]
    for name in names:
        import_module(name)
    hidden = []
    for name in names:
        package, _, own = name.rpartition(".")
        if not isinstance(getattr(import_module(package), own), ModuleType):
            hidden.append(name)
    assert hidden == []

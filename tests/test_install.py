"""`pip install .` on a bare machine: little is installed, it works without a compiler and on every Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreseed.engine import Engine, Samples, load
from foreseed.engine.program import Kind, Op, assemble

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = 11
"""The minor version of pyproject's requires-python."""
SHARD = bytes([1, 0, 50, 100, 200])

LOSS = """
import sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from foreseed.engine import Engine, Samples, load
model = load(sys.argv[1])
loss, correct = Engine(model.program).loss(model.values, Samples.records(bytes.fromhex(sys.argv[2]), 4))
print(Engine.__name__, *(warning.category.__name__ for warning in said), loss)
"""

VECTORS = """
import sys
from types import SimpleNamespace
from foreseed.engine import native
sys.path.append(sys.argv[1])
from tests.engine import test_vectors
checks = [check for name, check in vars(test_vectors).items() if name.startswith("test_")]
checks = [check for check in checks if check.__code__.co_argcount]  # those that take a backend
for check in checks:
    check(SimpleNamespace(functions=native))
print(sys.version_info[1], *(check.__name__ for check in checks))
"""

SOURCES = """
from pathlib import Path
import foreseed
package = Path(foreseed.__file__).parent
print(*(path.name for folder in ("csrc", "trained/firmware") for path in (package / folder).iterdir()))
"""

# Whether an interpreter starts (a version manager's stand-in may not), is the one that its name says, and can build.
COMPLETE = """
import os, sys, sysconfig, venv
sys.exit(sys.version_info[1] != int(sys.argv[1]) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
"""


def supported_pythons() -> dict[int, Path]:
    """This interpreter, and one of every other supported version: on PATH, or one of pyenv's; by minor version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [*map(Path, os.get_exec_path()), *sorted(pyenv.glob("versions/*/bin"))]
    found = {sys.version_info[1]: Path(sys.executable)}
    for minor, path in ((minor, path) for folder in folders for minor, path in _pythons(folder)):
        if minor >= OLDEST and minor not in found and _is_complete(path, minor):
            found[minor] = path
    return dict(sorted(found.items()))


def _pythons(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.glob("python3.*")):
        if name := re.fullmatch(r"python3\.(\d+)", path.name):
            yield int(name[1]), path


def _is_complete(python: Path, minor: int) -> bool:
    try:
        done = subprocess.run([python, "-I", "-c", COMPLETE, str(minor)], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


PYTHONS = supported_pythons()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file written here, to be read by the installations."""
    path = tmp_path_factory.mktemp("model") / "model.fsp"
    ops = [Op(Kind.CONV, 0, channels=3, groups=1, window=(2, 2, 1, 1, 0, 0))]
    program = assemble((1, 2, 2), 3, [0.01], [0.0], ops, [[0, 3, 5, 10]])
    program.save(path, array("f", [0.5, -0.25, 1.0, 2.0]))
    return path


class Installation:
    """A virtual environment of its own, and a copy of the sources."""

    def __init__(self, folder: Path, python: str | Path = sys.executable) -> None:
        self.source = folder / "source"
        # What was built here must not be taken for what is built there.
        built = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
        for name in ("src", "csrc"):
            shutil.copytree(ROOT / name, self.source / name, ignore=built)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.source)
        subprocess.run([python, "-I", "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.bin = folder / "venv" / "bin"

    def pip(self, *arguments: str, compiler: bool = True) -> str:
        """What pip says; without a compiler, none is to be found."""
        constraints = ["-c", str(CONSTRAINTS)] if CONSTRAINTS.exists() else []
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if not compiler:
            environment |= {"PATH": str(self.bin), "CC": "/nonexistent"}
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, *arguments, *(constraints if arguments[0] == "install" else [])],
            capture_output=True, text=True, check=False, env=environment, cwd=self.source,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def loss(self, model: Path) -> tuple[list[str], float]:
        """The engine's name with the warnings of its import, and the loss that it computes."""
        *names, loss = self.run("python", "-I", "-c", LOSS, str(model), SHARD.hex()).split()
        return names, float(loss)

    def run(self, program: str, *arguments: str) -> str:
        """What an installed program prints, run away from the sources."""
        done = subprocess.run(
            [self.bin / program, *arguments], capture_output=True, text=True, check=False, cwd=self.bin
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


def expected_loss(model: Path) -> float:
    found = load(model)
    return Engine(found.program).loss(found.values, Samples.records(SHARD, 4))[0]


@pytest.mark.parametrize("minor", PYTHONS)
def test_plain_install_brings_the_c_engine_without_numpy_or_torch(minor: int, model: Path, tmp_path: Path) -> None:
    installation = Installation(tmp_path, PYTHONS[minor])
    installation.pip("install", ".")
    names = {line.split()[0].lower() for line in installation.pip("list").splitlines()}
    assert {"foreseed", "cffi"} <= names
    assert not names & {"numpy", "torch"}
    assert installation.loss(model) == (["NativeEngine"], expected_loss(model))
    version, *checked = installation.run("python", "-I", "-c", VECTORS, str(ROOT)).split()
    assert int(version) == minor
    assert {"test_directions", "test_gradient_estimates", "test_sgd_steps", "test_adam_steps"} <= set(checked)
    assert "--broker" in installation.run("foreseed-device", "--help")
    # What `foreseed export --to c` gives to firmware.
    shipped = installation.run("python", "-I", "-c", SOURCES).split()
    sources = [path.name for path in (ROOT / "csrc").iterdir() if path.suffix in (".c", ".h", ".inl")]
    assert sorted(shipped) == sorted([*sources, "Makefile", "main.c"])


def test_install_without_a_compiler_warns_once_and_uses_numpy(model: Path, tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.pip("install", "numpy")
    for how in (["."], ["--editable", "."]):
        installation.pip("install", *how, compiler=False)
        names, loss = installation.loss(model)
        assert names == ["ReferenceEngine", "RuntimeWarning"]
        assert loss == pytest.approx(expected_loss(model), rel=1e-6)


def test_oldest_python_here_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{OLDEST}"

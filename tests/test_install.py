"""`pip install .` on a bare machine: little is installed, and it works without a compiler as well."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from array import array
from pathlib import Path

import pytest

from foreseed.engine import Engine, Samples, load
from foreseed.engine.program import Kind, Op, assemble

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
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

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        # What was built here must not be taken for what is built there.
        built = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
        for name in ("src", "csrc"):
            shutil.copytree(ROOT / name, self.source / name, ignore=built)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.source)
        venv.create(folder / "venv", symlinks=True)
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
        done = subprocess.run(
            [self.bin / "python", "-I", "-c", LOSS, model, SHARD.hex()], capture_output=True, text=True, check=False,
            cwd=model.parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        *names, loss = done.stdout.split()
        return names, float(loss)


def expected_loss(model: Path) -> float:
    found = load(model)
    return Engine(found.program).loss(found.values, Samples.records(SHARD, 4))[0]


def test_plain_install_brings_the_c_engine_without_numpy_or_torch(model: Path, tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.pip("install", ".")
    names = {line.split()[0].lower() for line in installation.pip("list").splitlines()}
    assert {"foreseed", "cffi"} <= names
    assert not names & {"numpy", "torch"}
    assert installation.loss(model) == (["NativeEngine"], expected_loss(model))


def test_install_without_a_compiler_warns_once_and_uses_numpy(model: Path, tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.pip("install", "numpy")
    for how in (["."], ["--editable", "."]):
        installation.pip("install", *how, compiler=False)
        names, loss = installation.loss(model)
        assert names == ["ReferenceEngine", "RuntimeWarning"]
        assert loss == pytest.approx(expected_loss(model), rel=1e-6)

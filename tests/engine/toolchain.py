"""Compiling the C engine for tests, here and for other processors."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = sorted((ROOT / "csrc").glob("*.c"))
FUZZER = sorted((ROOT / "tests/engine/fuzz").glob("*.c"))
# The rounding that docs/format.md demands. What the package's own build adds beside them must not matter.
FLAGS = ("-std=c99", "-ffp-contract=off", f"-I{ROOT / 'csrc'}")
HOSTED = ("-D_POSIX_C_SOURCE=200809L", "-fno-math-errno")
# The choice of an instruction set, which is made in one file, then finds none, and takes the plain loops.
NO_VECTORS = "-D__builtin_cpu_supports(feature)=0"
CHOOSER = ROOT / "csrc/directions.c"

_objects: dict[tuple[str | Path, ...], Path] = {}


def need(tool: str, packages: str) -> None:
    """Fail, saying what to install, where a tool is missing."""
    if shutil.which(tool) is None:
        pytest.fail(f"{tool} is missing: install the Debian packages {packages} (make test does so)", pytrace=False)


def run(command: Sequence[str | Path], **options: object) -> str:
    """The standard output of a command, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command[0]} {command[1]} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return str(done.stdout)


def compile_all(compiler: Sequence[str], sources: Iterable[Path], folder: Path, *flags: str) -> list[Path]:
    """The object files of the sources, two compilers at a time.

    Loops of vectors take a compiler many seconds, so what was compiled before, in whatever folder, is taken from there.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        meant = flags if source == CHOOSER else [flag for flag in flags if flag != NO_VECTORS]
        command = (*compiler, *FLAGS, *meant, "-c", source)
        if command not in _objects:
            target = Path(mkdtemp(dir=folder), f"{source.stem}.o")
            run([*command, "-o", target], cwd=target.parent)
            _objects[command] = target
        return _objects[command]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def link(compiler: Sequence[str], objects: Iterable[Path], target: Path, *flags: str) -> Path:
    run([*compiler, *flags, *objects, "-o", target])
    return target

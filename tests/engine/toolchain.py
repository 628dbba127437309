"""Compiling the C engine for tests, here and for other processors."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = sorted((ROOT / "csrc").glob("*.c"))
FUZZER = sorted((ROOT / "tests/engine/fuzz").glob("*.c"))
# The rounding that docs/format.md demands. What the package's own build adds beside them must not matter.
FLAGS = ("-std=c99", "-ffp-contract=off", f"-I{ROOT / 'csrc'}")
HOSTED = ("-D_POSIX_C_SOURCE=200809L", "-fno-math-errno")
# The choice of an instruction set then finds none, and takes the plain loops.
NO_VECTORS = "-D__builtin_cpu_supports(feature)=0"


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
    """The object files of the sources, two compilers at a time."""
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        run([*compiler, *FLAGS, *flags, "-c", source, "-o", target], cwd=folder)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def link(compiler: Sequence[str], objects: Iterable[Path], target: Path, *flags: str) -> Path:
    run([*compiler, *flags, *objects, "-o", target])
    return target

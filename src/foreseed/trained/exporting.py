"""A trained model in the form that others read: PyTorch, ONNX, a program file, C."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from foreseed.trained.c_folder import write_c
from foreseed.trained.model import ExportError, Trained
from foreseed.trained.onnx_file import write_onnx
from foreseed.trained.torch_file import write_torch


class Format(NamedTuple):
    """A form that models are written in."""

    write: Callable[[Trained, Path], list[Path]]
    """Writes it, and gives the files."""
    suffix: str


def export(trained: Trained, to: str, out: str | PathLike[str] | None = None) -> list[Path]:
    """Write a model in one of the `FORMATS`, by default to the name of its run here; gives the files written."""
    if to not in FORMATS:
        raise ExportError(f"no format {to!r}; expected one of {', '.join(FORMATS)}")
    target = Path(trained.name + FORMATS[to].suffix) if out is None else Path(out).expanduser()
    if target.exists():
        raise ExportError(f"{target} exists; choose another --out")
    if not target.parent.is_dir():
        raise ExportError(f"{target.parent}: there is no such folder; make it, or choose another --out")
    try:
        return FORMATS[to].write(trained, target)
    except OSError as error:
        raise ExportError(f"{target}: cannot write it ({error.strerror or error}); choose another --out") from None


def _write_fsp(trained: Trained, out: Path) -> list[Path]:
    """Write a program file (docs/format.md); values and statistics stand in it as little-endian float32."""
    trained.program.save(out, trained.values.tobytes(), trained.stats.tobytes(), trained.classes)
    return [out]


FORMATS = {
    "torch": Format(write_torch, ".pt"),
    "onnx": Format(write_onnx, ".onnx"),
    "fsp": Format(_write_fsp, ".fsp"),
    "c": Format(write_c, "-c"),
}

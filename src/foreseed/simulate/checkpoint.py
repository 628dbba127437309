"""State on disk that survives a kill at any moment."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from foreseed.engine import ForeseedError

PARTIAL = ".partial"
"""How the name of a file ends while it is being written."""

Arrays = dict[str, npt.NDArray[np.generic]]


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole, with the new content or the old, whatever happens."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write named arrays atomically."""
    buffer = io.BytesIO()
    named: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    np.savez(buffer, **named)
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> Arrays:
    """Read what `save` wrote."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise ForeseedError(f"{path}: not a checkpoint that can be read ({error}); start the run anew") from None

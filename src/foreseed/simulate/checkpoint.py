"""State on disk that survives a kill at any moment."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from foreseed.engine import ForeseedError
from foreseed.engine.files import write_whole

Arrays = dict[str, npt.NDArray[np.generic]]


def save(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write named arrays atomically."""
    buffer = io.BytesIO()
    named: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    np.savez(buffer, **named)
    write_whole(path, buffer.getbuffer())


def load(path: Path) -> Arrays:
    """Read what `save` wrote."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise ForeseedError(f"{path}: not a checkpoint that can be read ({error}); start the run anew") from None

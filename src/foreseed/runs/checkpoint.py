"""State on disk that survives a kill at any moment: any method's, by the rules of `foreseed.methods.protocol.State`."""

from __future__ import annotations

import io
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from foreseed.engine import ForeseedError, Program
from foreseed.engine.files import write_whole
from foreseed.methods import KeepsFiles

if TYPE_CHECKING:
    from foreseed.engine.files import Fence

Arrays = dict[str, npt.NDArray[Any]]


def save(path: Path, round: int, state: Any, fence: Fence | None = None) -> None:
    """Write a state atomically, with the number of rounds that it has seen."""
    arrays: Arrays = {"round": np.asarray(round)}
    _flatten("state", state, arrays)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_whole(path, buffer.getbuffer(), fence=fence)


def restore(path: Path, state: Any) -> int:
    """Put what `save` wrote into a state fresh from `init`; returns the number of rounds."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        _fill("state", state, arrays)
        return int(arrays["round"])
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise _unreadable(path, error) from None


def round_of(path: Path) -> int:
    """The number of rounds that a checkpoint has seen; 0 where there is none yet."""
    if not path.exists():
        return 0
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            return int(saved["round"])
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ForeseedError:
    return ForeseedError(
        f"{path}: not a checkpoint that can be read ({error}); go back with --resume --at ROUND (`foreseed runs` lists "
        "the rounds that are kept), or start the run anew"
    )


def keep_files(folder: Path, state: Any) -> None:
    """Give every part of a state that keeps files of its own the folder for them."""
    if isinstance(state, KeepsFiles):
        state.keep_in(folder)
    elif is_dataclass(state):
        for name in _saved(state):
            keep_files(folder, getattr(state, name))


def _saved(state: Any) -> list[str]:
    return [field.name for field in fields(state) if field.metadata.get("saved", True)]


def _flatten(name: str, value: Any, arrays: Arrays) -> None:
    if is_dataclass(value):
        for field in _saved(value):
            _flatten(f"{name}.{field}", getattr(value, field), arrays)
    elif isinstance(value, list):
        # As one array and the lengths of its parts: a list may have hundreds.
        parts = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else np.asarray(part) for part in value]
        arrays[f"{name}.sizes"] = np.array([len(part) for part in parts], np.int64)
        arrays[name] = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    elif isinstance(value, Program | bytes):
        arrays[name] = np.frombuffer(value.bytes if isinstance(value, Program) else value, np.uint8)
    elif isinstance(value, np.ndarray | int | float):
        arrays[name] = np.asarray(value)
    elif value is not None:
        raise TypeError(f"{name} of a method's state is a {type(value).__name__}, which no checkpoint can hold")


def _fill(name: str, state: Any, arrays: Arrays) -> None:
    for field in _saved(state):
        key, now = f"{name}.{field}", getattr(state, field)
        if is_dataclass(now):
            _fill(key, now, arrays)
        elif key in arrays or now is not None:
            setattr(state, field, _value(now, key, arrays))


def _value(now: Any, key: str, arrays: Arrays) -> Any:
    array = arrays[key]
    if isinstance(now, list):
        parts = np.split(array, np.cumsum(arrays[f"{key}.sizes"])[:-1]) if len(arrays[f"{key}.sizes"]) else []
        return [part.tobytes() for part in parts] if array.dtype == np.uint8 else [part.copy() for part in parts]
    if isinstance(now, Program):
        # The very same program, if it has not changed: engines are made for it.
        return now if now.bytes == array.tobytes() else Program(array.tobytes(), [layer.name for layer in now.layers()])
    if isinstance(now, bytes):
        return array.tobytes()
    return type(now)(array) if isinstance(now, int | float) else array

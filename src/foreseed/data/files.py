"""Files that are there whole or not at all, their checksums, and what to say when the disk refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foreseed.data.errors import DataError
from foreseed.engine import files


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in a sentence which path could not be read."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot read it ({error.strerror or error}); check the path and its permissions"
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence which path could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot write it ({error.strerror or error}); free space or choose another folder"
        ) from None


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file so that nobody ever sees half of it, in a folder that is made if need be."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, data)


def md5_of(path: Path) -> str:
    """The MD5 under which data sets publish their archives: it finds damage, it is no proof against malice."""
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

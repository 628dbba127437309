"""Files that are there whole or not at all. No `pathlib`: a device loads this module (see `head.py`)."""

from __future__ import annotations

import os

from foreseed.engine.types import Buffer


def write_whole(path: str | os.PathLike[str], *pieces: Buffer) -> None:
    """Write a file, to the disk, so that nobody ever sees half of it; what could not be finished leaves nothing."""
    folder, name = os.path.split(os.fspath(path))
    partial = os.path.join(folder, f".{name}.partial-{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise

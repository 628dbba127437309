"""Files that are there whole or not at all. No `pathlib`: a device loads this module (see `head.py`)."""

from __future__ import annotations

import os

from foreseed.engine.types import Buffer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Fence(Protocol):
        """What keeps out a process that has lost the right to write."""

        @property
        def mark(self) -> str:
            """Its part of the names of files that are being written."""

        def check(self) -> None:
            """Raise if the right is lost."""


PARTIAL = ".partial"
"""How the name of a file ends while it is being written: the same each time, so that kills leave one at most."""


def write_whole(path: str | os.PathLike[str], *pieces: Buffer, fence: Fence | None = None) -> None:
    """Write a file, to the disk: it is there whole, with the new content or the old, whatever happens.

    What could not be finished leaves nothing. One process at a time may write a file; a `fence` sees to that.
    """
    folder, name = os.path.split(os.fspath(path))
    partial = os.path.join(folder, f".{name}{fence.mark if fence else ''}{PARTIAL}")
    try:
        with open(partial, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if fence is not None:
            # Whoever takes the right removes what is partial: a pause from here on ends without a file to rename.
            fence.check()
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
    # The new name is on the disk only when its folder is.
    entry = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)

"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from foreseed.engine.types import Buffer


def write_whole(path: str | os.PathLike[str], data: Buffer) -> None:
    """Write a file, to the disk, so that nobody ever sees half of it; what could not be finished leaves nothing."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

"""What a device knows of a program: its bytes and the numbers in its header.

Standard library's `struct` only. What a device imports is counted: `dataclasses`, `typing`, `enum`, `hashlib` and
`json` together would double what a device process needs, so they stand in `program.py`, for servers.
"""

from __future__ import annotations

import struct

from foreseed.engine.errors import ProgramError

PROGRAM_MAGIC = b"FSPP"
VERSION = 2
"""The newest version of programs; one is written in the oldest that has all its ops."""
HEADER = struct.Struct("<4sHHHHHHIIII")


class ProgramHead:
    """A program section with its header read; the engine checks the rest."""

    def __init__(self, data: bytes) -> None:
        self.bytes = bytes(data)
        if len(data) < HEADER.size:
            raise ProgramError(
                f"program truncated: {len(data)} bytes, its header alone has {HEADER.size}; get it again"
            )
        magic, version, n_ops, c, h, w, classes, n_live, n_stats, n_structure, reserved = HEADER.unpack_from(data)
        if magic != PROGRAM_MAGIC:
            raise ProgramError(f"not a program: it starts with {magic!r}, expected {PROGRAM_MAGIC!r}")
        if version > VERSION:
            raise ProgramError(
                f"program version {version} is from the future: this foreseed reads up to {VERSION}; upgrade it"
            )
        if version < 1 or reserved or not 1 <= n_ops <= 256:
            raise ProgramError(f"program header damaged: version {version}, {n_ops} ops; get it again")
        self.version: int = version
        self.n_ops: int = n_ops
        self.input_shape: tuple[int, int, int] = (c, h, w)
        self.classes: int = classes
        self.n_live: int = n_live
        self.n_stats: int = n_stats
        self.n_structure: int = n_structure

    @property
    def image_bytes(self) -> int:
        """Bytes of one uint8 image."""
        c, h, w = self.input_shape
        return c * h * w

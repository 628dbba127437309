"""What a device keeps over a restart: its program, and the values of the last round that it saw.

Standard library only: a device loads this module.
"""

from __future__ import annotations

import os
import struct
from array import array
from hashlib import blake2b

from foreseed.engine.errors import ForeseedError
from foreseed.engine.files import write_whole
from foreseed.wire import NOTHING_HELD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import BufferedReader

    from foreseed.engine.types import Buffer

_MAGIC, _VERSION, _DIGEST = b"FSDS", 1, 16
# Magic, version, number of vectors, run, number, program's hash, program's bytes, numbers in a vector, round.
_HEAD = struct.Struct("<4sHH8sI16sIIq")


class StateError(ForeseedError):
    """A state file that cannot be opened."""


class Held:
    """A device's part in a run: who it is there, the program, and the values of a round."""

    __slots__ = ("number", "program", "program_hash", "round", "run", "values", "vectors")

    def __init__(
        self,
        run: bytes,
        number: int,
        program_hash: bytes,
        program: bytes,
        round: int,
        values: array[float],
        vectors: Sequence[array[float]],
    ) -> None:
        self.run, self.number, self.program_hash, self.program = run, number, program_hash, program
        self.round = round
        """The round after which the values were these, or NOTHING_HELD: they then mean nothing."""
        self.values, self.vectors = values, vectors
        """The trainable numbers, and the optimiser's vectors of the same length."""


def save(path: str | os.PathLike[str], held: Held) -> None:
    """Write the state file, so that a crash at any moment leaves the old one or the new one."""
    numbers: Sequence[Buffer] = () if held.round == NOTHING_HELD else (held.values, *held.vectors)
    head = _HEAD.pack(
        _MAGIC, _VERSION, max(len(numbers) - 1, 0), held.run, held.number, held.program_hash, len(held.program),
        len(held.values) if numbers else 0, held.round,
    )  # fmt: skip
    pieces = (head, held.program, *numbers)
    digest = blake2b(digest_size=_DIGEST)
    for piece in pieces:
        digest.update(piece)
    write_whole(path, *pieces, digest.digest())


def load(path: str | os.PathLike[str], say: Callable[[str], None]) -> Held | None:
    """What the state file holds; None if there is none, or if a single bit of it is wrong, which is said."""
    try:
        with open(path, "rb") as file:
            held = _read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{os.fspath(path)}: cannot read the state ({error.strerror}); check --state") from None
    if held is None:
        say(f"{os.fspath(path)}: the state is damaged, or no state at all; the server will be asked for it again")
    return held


def _read(file: BufferedReader) -> Held | None:
    head, size = file.read(_HEAD.size), os.fstat(file.fileno()).st_size
    if len(head) < _HEAD.size:
        return None
    magic, version, n_vectors, run, number, program_hash, program_bytes, n, round = _HEAD.unpack(head)
    # Before anything of that size is read: a wrong head must not make a small device ask for gigabytes.
    if (magic, version) != (_MAGIC, _VERSION) or size != _HEAD.size + program_bytes + 4 * n * (1 + n_vectors) + _DIGEST:
        return None
    program = file.read(program_bytes)
    vectors = [array("f", [0.0]) * n for _ in range(1 + n_vectors)]
    digest = blake2b(head, digest_size=_DIGEST)
    digest.update(program)
    for vector in vectors:
        with memoryview(vector).cast("B") as view:
            file.readinto(view)
        digest.update(vector)
    if file.read() != digest.digest():
        return None
    return Held(run, number, program_hash, program, round, vectors[0], vectors[1:])

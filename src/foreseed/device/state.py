"""What a device keeps over a restart: its program, and the values of the last round that it saw.

A device loads this module: see `probing.py`.
"""

from __future__ import annotations

import os
import struct
from array import array
from hashlib import blake2b

from foreseed.device.probing import Order
from foreseed.engine.errors import ForeseedError
from foreseed.engine.files import write_whole
from foreseed.engine.update import replay
from foreseed.wire import NOTHING_HELD, values_hash

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import BufferedReader

    from foreseed.engine.types import Buffer
    from foreseed.wire import OrderMessage

_MAGIC, _VERSION, _DIGEST = b"FSDS", 1, 16
# Magic, version, number of vectors, run, number, program's hash, program's bytes, numbers in a vector, round.
_HEAD = struct.Struct("<4sHH8sI16sIIq")


class StateError(ForeseedError):
    """A state file that cannot be opened."""


class RunState:
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

    def catch_up(self, order: OrderMessage) -> bool:
        """Replay what was missed, if it leads to the order's values; returns whether these are the values held now."""
        missed = [update for update in order.updates if update.round > self.round]
        without_gap = [update.round for update in missed] == [self.round + 1 + i for i in range(len(missed))]
        if self.round != NOTHING_HELD and without_gap and self.round + len(missed) == order.round - 1:
            if not all(_fits(update.step, len(self.vectors)) for update in missed):
                return False
            # Whatever interrupts a replay leaves values of no round.
            self.round = NOTHING_HELD
            for update in missed:  # one by one, so that there is one gradient at a time
                replay(self.values, self.vectors, [update], order.seed, Order.of(order).kind)
            if values_hash(self.values) == order.values_hash:
                self.round = order.round - 1
        return self.round == order.round - 1

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset into values and vectors, thought of as lying one after the other."""
        # From the first byte on, the values are neither the old nor the new.
        self.round = NOTHING_HELD
        for vector in (self.values, *self.vectors):
            with memoryview(vector).cast("B") as span:
                end = min(offset + len(data), len(span))
                if offset < end:
                    span[offset:end] = data[: end - offset]
                    data = data[end - offset :]
                offset = max(offset - len(span), 0)


def save(path: str | os.PathLike[str], state: RunState) -> None:
    """Write the state file, so that a crash at any moment leaves the old one or the new one."""
    numbers: Sequence[Buffer] = () if state.round == NOTHING_HELD else (state.values, *state.vectors)
    head = _HEAD.pack(
        _MAGIC, _VERSION, max(len(numbers) - 1, 0), state.run, state.number, state.program_hash, len(state.program),
        len(state.values) if numbers else 0, state.round,
    )  # fmt: skip
    pieces = (head, state.program, *numbers)
    digest = blake2b(digest_size=_DIGEST)
    for piece in pieces:
        digest.update(piece)
    write_whole(path, *pieces, digest.digest())


def load(path: str | os.PathLike[str], say: Callable[[str], None]) -> RunState | None:
    """What the state file holds; None if there is none, or if a single bit of it is wrong, which is said."""
    try:
        with open(path, "rb") as file:
            state = _read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{os.fspath(path)}: cannot read the state ({error.strerror}); check --state") from None
    if state is None:
        say(f"{os.fspath(path)}: the state is damaged, or no state at all; the server will be asked for it again")
    return state


def _read(file: BufferedReader) -> RunState | None:
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
    return RunState(run, number, program_hash, program, round, vectors[0], vectors[1:])


def _fits(step: bytes, vectors: int) -> bool:
    """Whether an optimiser's step works on the vectors that there are: adam has two, sgd one for its momentum."""
    constants = array("f", step)
    return vectors == 2 if len(constants) == 7 else vectors == 1 or not (vectors or constants[1])

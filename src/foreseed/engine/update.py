"""Applying a round of the update log, to the bit: what the server does, and a device that replays.

No `typing` at run time: a device loads this module (see `head.py`).
"""

from __future__ import annotations

from array import array

from foreseed.engine import Directions, accumulate, adam, sgd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from foreseed.engine.types import Buffer, DirectionKind

    class LogEntry(Protocol):
        """The part of `foreseed.wire.Update` that applying it needs."""

        @property
        def round(self) -> int: ...
        @property
        def step(self) -> bytes: ...
        @property
        def parts(self) -> tuple[tuple[int, bytes], ...]: ...


def estimate(gradient: Buffer, update: LogEntry, seed: int, kind: DirectionKind, start: int = 0) -> None:
    """Add the round's gradient estimate to (a range of) a zeroed vector: sum of coefficients times directions."""
    for device, coefficients in update.parts:
        directions = Directions(seed, update.round, device, count=len(coefficients) // 4, kind=kind)
        accumulate(gradient, directions, coefficients, start)


def apply_step(values: Buffer, buffers: Sequence[Buffer], gradient: Buffer, step: bytes) -> None:
    """One optimiser step in place; `buffers` are the optimiser's vectors: none or momentum (sgd), m and v (adam)."""
    constants = array("f", step)
    if len(constants) == 7:
        m, v = buffers
        adam(values, m, v, gradient, *constants)
    else:
        lr, mu, decay = constants
        sgd(values, buffers[0] if buffers else None, gradient, lr, mu, decay)


def replay(
    values: Buffer, buffers: Sequence[Buffer], updates: Sequence[LogEntry], seed: int, kind: DirectionKind
) -> None:
    """Bring values from one round to a later one, exactly as the server went."""
    for update in updates:
        gradient = array("f", bytes(memoryview(values).nbytes))
        estimate(gradient, update, seed, kind)
        apply_step(values, buffers, gradient, update.step)

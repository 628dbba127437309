"""What devices that are not simulated have in common, whatever carries their messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from foreseed.engine import ForeseedError, Program
from foreseed.methods.protocol import Vector
from foreseed.methods.task import Task
from foreseed.methods.workers import Workers
from foreseed.wire import Reply

T = TypeVar("T")
R = TypeVar("R")


class RealDevices:
    """Devices that answer orders and do nothing else; the server's own work is done here."""

    def __init__(self, task: Task) -> None:
        self.task, self._workers = task, Workers(task)
        self._sizes: dict[int, int] = {}
        self._asked_at: float | None = None
        """When the round's first order went out."""

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return self._workers.map(work, items)

    def evaluate(self, program: Program, values: Vector, stats: Vector) -> tuple[float, float]:
        return self._workers.evaluate(program, values, stats)

    def digests(self) -> dict[str, str]:
        """Nobody but the devices knows what they hold."""
        return {}

    def sizes(self) -> npt.NDArray[np.int64]:
        """What devices said when they answered."""
        return np.array([self._sizes[device] for device in sorted(self._sizes)], np.int64)

    def train(self, *_: Any) -> Iterator[Any]:
        raise ForeseedError(
            "real devices answer orders and do nothing else; expected a method that asks no more, such as ntk-baffle"
        )

    gradients = visit = probe = train

    def _check_program(self, program: Program) -> None:
        if program is not self.task.program:
            raise ForeseedError("real devices keep the program that they began with; expected a method of a fixed mask")

    def _measured(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """What a round's row has of real devices alone."""
        assert self._asked_at is not None
        waited = 1000 * (time.monotonic() - self._asked_at)
        self._sizes |= {reply.device: reply.samples for reply in replies}
        return {
            "round_overhead_ms": waited - min(waited, max(reply.compute_ms for reply in replies)),
            "sizes": [reply.samples for reply in replies],
            "peaks_kib": [reply.peak_kib for reply in replies],
        }

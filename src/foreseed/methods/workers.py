"""Threads that work for a run, each with an engine of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import fsum
from typing import TypeVar

import torch

from foreseed.engine import Engine, Program, Samples
from foreseed.methods.protocol import Vector
from foreseed.methods.task import Task

T = TypeVar("T")
R = TypeVar("R")

# Wide: enough images and directions side by side to keep a core's vector units busy, little enough for its cache.
_BATCH, _DIRECTIONS = 32, 8
_TEST_CHUNK = 1000


class Workers:
    """As many threads as the config says; results are the same bits for any number."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.count = task.config.workers or os.cpu_count() or 1
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.count)
        self._local = threading.local()

    def close(self) -> None:
        self._pool.shutdown()
        torch.set_num_threads(self._threads)

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Results in the order of the items; the work is shared out over the threads."""
        return self._pool.map(work, items)

    def engine(self, program: Program) -> Engine:
        """This thread's engine for a program."""
        return self.own("engine", program, lambda: self.make_engine(program))

    def make_engine(self, program: Program) -> Engine:
        # BatchNorm's statistics are those of a batch, so there its size is the config's.
        batch = self.task.config.train.batch if program.n_stats else _BATCH
        return Engine(program, batch=batch, directions=_DIRECTIONS)

    def own(self, name: str, program: Program, make: Callable[[], T]) -> T:
        """What this thread has made for a program; another program's is given up, since masks may change."""
        kept: tuple[Program, T] | None = getattr(self._local, name, None)
        if kept is None or kept[0] is not program:
            kept = (program, make())
            setattr(self._local, name, kept)
        return kept[1]

    def evaluate(self, program: Program, values: Vector, stats: Vector) -> tuple[float, float]:
        """Accuracy and mean loss on the test images."""
        test = Samples.records(self.task.test, program.image_bytes)
        chunks = [test.part(at, min(_TEST_CHUNK, test.count - at)) for at in range(0, test.count, _TEST_CHUNK)]
        frozen = stats if stats.size else None
        results = list(self.map(lambda chunk: self.engine(program).loss(values, chunk, frozen), chunks))
        return sum(correct for _, correct in results) / test.count, fsum(loss for loss, _ in results) / test.count

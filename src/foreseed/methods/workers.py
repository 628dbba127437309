"""Threads that work for a run, each with an engine of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import fsum
from pathlib import Path
from typing import TypeVar

import torch

from foreseed.engine import Engine, Program, Samples
from foreseed.engine.blocks import spans, starts
from foreseed.methods.layout import layout
from foreseed.methods.protocol import Vector
from foreseed.methods.task import Task

T = TypeVar("T")
R = TypeVar("R")

# Images and directions side by side: many keep a core's vector units busy, fewer stay in its second cache. An op reads
# only a part of the memory, so a few times that cache is best: 1.1 MB for a pruned LeNet-5, where it has 0.5 MB.
_WAYS = ((16, 1), (16, 4), (32, 4), (32, 8))
_CACHES = 3.75
_TEST_CHUNK = 1000


def fitting_engine(program: Program, batch: int | None = None, keep: Sequence[int] = ()) -> Engine:
    """An engine with as many images (or `batch` of them) and directions side by side as suit the second cache.

    It can go on from the values that it is to `keep`, where blocks begin.
    """
    engine = None
    for images, directions in _WAYS:
        wider = Engine(program, batch=batch or images, directions=directions, keep=keep)
        if engine is not None and wider.planned_bytes > _CACHES * second_cache_bytes():
            break
        engine = wider
    assert engine is not None
    return engine


def second_cache_bytes() -> int:
    """A core's second cache, as Linux tells it; elsewhere half a megabyte, a common size."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
        return int(size.strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 512 * 1024


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
        """Results in the order of the items; the work is shared out over the threads, if there are several."""
        return self._pool.map(work, items) if self.count > 1 else map(work, items)

    def engine(self, program: Program) -> Engine:
        """This thread's engine for a program."""
        return self.own("engine", program, lambda: self.make_engine(program))

    def make_engine(self, program: Program) -> Engine:
        # BatchNorm's statistics are those of a batch, so there its size is the config's.
        train = self.task.config.train
        blocks = layout(program, train.blocks, train.k, train.spread)
        return fitting_engine(program, train.batch if program.n_stats else None, starts(spans(blocks)))

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

"""Timing on a noisy machine: contenders take turns, and each one's best slice counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreseed.engine.errors import ForeseedError

# Many short slices: the chance is good that one of them is undisturbed.
_ROUNDS = 20
_FEWEST_ROUNDS = 3
_GEMM_SIDE = 1536


@dataclass(frozen=True)
class Setup:
    """One way to do the work: a contender with certain settings."""

    settings: str
    run: Callable[[int], object]
    """Does this many units of work (probes)."""
    step: int = 1
    """Units that are done together: work is given in multiples of it."""
    loss: Callable[[Tensor], float] | None = None
    """The loss with these parameters, to check that all contenders do the same work."""


def allowed_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def parse_threads(text: str | None) -> list[int]:
    """Numbers of threads from a comma-separated list; without one, 1 and 2 as far as there are cores."""
    available = len(allowed_cores())
    if text is None:
        return [n for n in (1, 2) if n <= available]
    chosen = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= n <= available for n in chosen):
        raise ForeseedError(f"threads {text!r}: expected numbers from 1 to {available} (the cores here), such as 1,2")
    return chosen


@contextmanager
def pinned(threads: int) -> Iterator[list[int]]:
    """Keep this thread, and those that it starts, on the first `threads` cores."""
    cores = allowed_cores()
    chosen, before = cores[:threads], torch.get_num_threads()
    pin(chosen)
    torch.set_num_threads(threads)
    try:
        yield chosen
    finally:
        pin(cores)
        torch.set_num_threads(before)


def in_threads(make: Callable[[], Setup], cores: Sequence[int]) -> Setup:
    """The same work by one thread a core, each with a copy of its own."""
    copies = [make() for _ in cores]
    pools = [ThreadPoolExecutor(1, initializer=pin, initargs=([core],)) for core in cores]

    def run(units: int) -> None:
        share = units // len(copies)
        futures = [pool.submit(copy.run, share) for pool, copy in zip(pools, copies, strict=True)]
        for future in futures:
            future.result()

    first = copies[0]
    return Setup(f"{first.settings}, one a core", run, first.step * len(copies), first.loss)


def pin(cores: Sequence[int]) -> None:
    """Keep the calling thread on these cores, where the system lets us."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def fastest(ways: Iterator[Setup]) -> Setup:
    """The best of a contender's settings, by a short trial of each; only the best so far is kept in memory."""
    best = next(ways)
    best_rate = max(_rate(best, best.step) for _ in range(2))
    for way in ways:
        rate = _rate(way, way.step)
        if rate > best_rate / 2:  # the first try also warms up, so only the hopeless are not tried again
            rate = max(rate, _rate(way, way.step))
        if rate > best_rate:
            best, best_rate = way, rate
    return best


def interleaved(ways: Mapping[str, Setup], seconds: float) -> dict[str, float]:
    """Units per second of every way: they take turns in slices until the time is up, and the best slice counts."""
    slice_seconds = seconds / (_ROUNDS * len(ways))
    units = {name: _fitting(way, slice_seconds) for name, way in ways.items()}
    best = dict.fromkeys(ways, 0.0)
    start, rounds = perf_counter(), 0
    while rounds < _FEWEST_ROUNDS or perf_counter() - start < seconds:
        for name, way in ways.items():
            best[name] = max(best[name], _rate(way, units[name]))
        rounds += 1
    return best


def _fitting(way: Setup, seconds: float) -> int:
    """Units of work that fill a slice, in whole steps and at least one."""
    return max(1, round(seconds * _rate(way, way.step) / way.step)) * way.step


def _rate(way: Setup, units: int) -> float:
    start = perf_counter()
    way.run(units)
    return units / (perf_counter() - start)


def gemm(threads: int) -> tuple[Setup, float]:
    """This machine's own float32 matrix product, and the GMACs of one: torch's BLAS's, or oneDNN's if it is faster.

    MKL keeps to AVX2 on processors that are not Intel's, and runs at half of what those with AVX-512 can.
    """
    a, b, out = (torch.rand(_GEMM_SIDE, _GEMM_SIDE) for _ in range(3))

    def way(name: str, multiply: Callable[[], object]) -> Setup:
        def run(times: int) -> None:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                for _ in range(times):
                    multiply()

        return Setup(f"{_GEMM_SIDE} x {_GEMM_SIDE}, {name}", run)

    ways = [way("BLAS", partial(torch.mm, a, b, out=out))]
    if torch.backends.mkldnn.is_available():
        ways.append(way("oneDNN", partial(linear, a.to_mkldnn(), b.to_mkldnn())))
    return fastest(iter(ways)), _GEMM_SIDE**3 / 1e9

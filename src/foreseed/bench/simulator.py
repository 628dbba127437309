"""What the simulator itself costs: the time of a device-round that is not spent inside the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from foreseed.bench.machine import describe_machine
from foreseed.config import load
from foreseed.engine import Program
from foreseed.methods import ntk_baffle
from foreseed.methods.workers import Workers
from foreseed.simulate import SimulatedDevices, prepare

_SETTINGS = (
    "prune.pruner=random", "data.devices=100", "data.per_round=100", "data.min_size=5", "data.partition=iid",
    "workers=1", "train.k=50", "train.spread=5",
)  # fmt: skip


class _Timed:
    """An engine whose calls are timed."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._engine, name)

        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.thread_time() - began

        return timed


class _TimedWorkers(Workers):
    """One thread that knows how long it was inside the engine."""

    inside = 0.0

    def make_engine(self, program: Program) -> Any:
        self.timed = _Timed(super().make_engine(program))
        return self.timed

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        # What learning maps is the estimate, which is the engine's; what asking maps is the devices.
        if work is not ntk_baffle.compute:
            return super().map(work, items)
        began = time.thread_time()
        results = [work(item) for item in items]
        self.inside += time.thread_time() - began
        return results


def bench_simulator(rounds: int = 20) -> dict[str, Any]:
    """Run rounds of 100 small devices on one thread; the best round counts, since machines are noisy.

    Time is the thread's own: nothing here waits, and what other processes take of a shared machine does not count.
    """
    task, population = prepare(load(None, _SETTINGS))
    workers = _TimedWorkers(task)
    fleet, state = SimulatedDevices(task, population, workers=workers), ntk_baffle.init(task)
    devices = task.config.data.per_round
    overheads, engines = [], []
    try:
        fleet.evaluate(task.program, task.values, task.stats)  # so that the engine is there
        for _ in range(rounds):
            before = workers.timed.seconds + workers.inside
            began = time.thread_time()
            ntk_baffle.round(task, fleet, state)
            seconds = time.thread_time() - began
            inside = workers.timed.seconds + workers.inside - before
            overheads.append((seconds - inside) / devices)
            engines.append(inside / devices)
    finally:
        fleet.close()
    return {
        "overhead_ms": 1e3 * min(overheads),
        "engine_ms": 1e3 * min(engines),
        "estimate_ms": 1e3 * workers.inside / (devices * rounds),
        "devices": devices,
        "rounds": rounds,
        "samples_per_device": len(population.records) / devices,
        "machine": describe_machine(),
    }

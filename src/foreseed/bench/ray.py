"""What Ray costs beside threads: the time that it adds to a device-round, and what a second worker gains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from foreseed.bench.machine import describe_machine, package_version
from foreseed.config import load
from foreseed.methods import Task, ntk_baffle
from foreseed.simulate import Population, SimulatedDevices, prepare
from foreseed.simulate.on_ray import SCHEME, RayHands
from foreseed.wire import OrderMessage

THREADS = "threads"
WORKERS = (1, 2)
_SETTINGS = (
    "model.name=lenet5", "data.set=digits", "data.partition=iid", "data.devices=100", "data.per_round=10",
    "data.min_size=5", "prune.pruner=random", "prune.density=0.1",
)  # fmt: skip
_LITTLE, _MUCH = 1, 100
"""Directions of a round: few, beside which overhead shows, and many, for how the work scales."""


def bench_ray(rounds: int = 50, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Rounds of LeNet-5 with 10 devices, by threads and by Ray in turn; the best count, since machines are noisy.

    The orders and the values are the same in every round. Times are milliseconds of a device-round.
    """
    task, population = prepare(load(None, _SETTINGS))
    coordinator = ntk_baffle.init(task).coordinator
    orders, values = coordinator.open(), coordinator.state.values
    with ExitStack() as stack:
        progress("starting Ray")
        contenders = {
            (name, workers): stack.enter_context(closing(_devices(name, workers, task, population)))
            for name in (THREADS, SCHEME)
            for workers in WORKERS
        }

        def best(k: int) -> dict[tuple[str, int], float]:
            asked = [order._replace(k=k, spread=1) for order in orders]
            seconds: dict[tuple[str, int], list[float]] = {key: [] for key in contenders}
            for number in range(rounds + 1):
                progress(f"K = {k}: round {number} of {rounds}")
                for key, devices in contenders.items():
                    seconds[key].append(_seconds(devices, asked, task, values))
            # The first one made engines.
            return {key: 1e3 * min(found[1:]) / len(orders) for key, found in seconds.items()}

        little, much = best(_LITTLE), best(_MUCH)
    return {
        "overhead": [
            {
                "workers": n,
                "threads_ms": little[THREADS, n],
                "ray_ms": little[SCHEME, n],
                "overhead_ms": little[SCHEME, n] - little[THREADS, n],
            }
            for n in WORKERS
        ],
        "gain": {name: much[name, WORKERS[0]] / much[name, WORKERS[-1]] for name in (THREADS, SCHEME)},
        "k": {"overhead": _LITTLE, "gain": _MUCH},
        "devices": len(orders),
        "rounds": rounds,
        "samples_per_device": len(population.records) / len(population.partition.sizes),
        "ray": package_version("ray"),
        "machine": describe_machine(),
    }


def _devices(name: str, workers: int, task: Task, population: Population) -> SimulatedDevices:
    task = replace(task, config=task.config.with_({"workers": workers}))
    return SimulatedDevices(
        task, population, elsewhere=RayHands(SCHEME, task, population) if name == SCHEME else None
    )  # fmt: skip


def _seconds(devices: SimulatedDevices, orders: Sequence[OrderMessage], task: Task, values: Any) -> float:
    began = time.perf_counter()
    devices.replies(orders, task.program, values)
    return time.perf_counter() - began

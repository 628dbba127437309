"""What devices that lie do to a run: its accuracy with some of them in the fleet, beside the honest run's."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import numpy as np

from foreseed.bench.machine import describe_machine
from foreseed.config import Config, load
from foreseed.config.schema import Train
from foreseed.engine import ForeseedError, Program
from foreseed.methods import Task, ntk_baffle
from foreseed.methods.protocol import Vector
from foreseed.simulate import Population, SimulatedDevices, prepare
from foreseed.wire import OrderMessage, Reply

SHARES = (1, 2, 4)
"""Of ten devices."""
_TESTS = 5
"""Accuracy is the mean of the last so many tests, two rounds apart."""
_SETTINGS = (
    "data.set=digits", "data.partition=dirichlet", "data.beta=0.5", "data.devices=20", "data.per_round=10",
    "data.min_size=10", "model.name=lenet5", "prune.density=0.05", "prune.iterations=5", "engine=exact",
    "train.k=400", "train.direction=rademacher", "train.rate=noise", "train.lr=0.1", "train.lr_decay=0.99",
)  # fmt: skip

Lie = Callable[[Reply, Train], Reply]


def _huge(reply: Reply, train: Train) -> Reply:
    return _said(reply, train, lambda numbers: np.full_like(numbers, 1e30))


def _flipped(reply: Reply, train: Train) -> Reply:
    """The other sign throughout: nothing in it looks wrong."""
    if train.bits == 32:
        return _said(reply, train, np.negative)
    return _coded(reply, train, lambda codes, every: codes ^ every)


def _random(reply: Reply, train: Train) -> Reply:
    """Numbers of the right size, but of no meaning, for many more images than there are."""
    rng = np.random.default_rng([reply.round, reply.device])
    made_up = reply._replace(samples=10**9)
    if train.bits == 32:
        return _said(made_up, train, lambda numbers: np.sqrt(np.mean(numbers**2)) * rng.normal(size=len(numbers)))
    noise = int.from_bytes(rng.bytes(len(reply.losses) - 8), "little")
    return _coded(made_up, train, lambda _, every: noise & every)


def _said(reply: Reply, train: Train, change: Callable[[Any], Any]) -> Reply:
    """A reply with other numbers: its differences, or their scale where that is all there is."""
    losses = reply.losses if train.bits == 32 else reply.losses[:8]
    numbers = np.frombuffer(losses, "<f4").copy()
    numbers[1:] = change(numbers[1:].astype(np.float64))
    return reply._replace(losses=numbers.tobytes() + reply.losses[len(losses) :])


def _coded(reply: Reply, train: Train, change: Callable[[int, int], int]) -> Reply:
    """A reply with other codes, as one long number; the function also gets the number with all their bits set."""
    codes = change(int.from_bytes(reply.losses[8:], "little"), (1 << train.k * train.bits) - 1)
    return reply._replace(losses=reply.losses[:8] + codes.to_bytes(len(reply.losses) - 8, "little"))


LIES: dict[str, Lie] = {
    "huge": _huge,
    "sign-flipped": _flipped,
    "random, 10^9 samples": _random,
    "base loss 1e30": lambda reply, _: reply._replace(losses=array("f", [1e30]).tobytes() + reply.losses[4:]),
    "NaN": lambda reply, train: _said(reply, train, lambda numbers: numbers * nan),
}


class LyingDevices(SimulatedDevices):
    """Simulated devices, some of which say something else than they found."""

    def __init__(self, task: Task, population: Population, liars: set[int], lie: Lie) -> None:
        super().__init__(task, population)
        self._liars, self._lie = liars, lie

    def replies(self, orders: Sequence[OrderMessage], program: Program, values: Vector) -> list[Reply]:
        found, train = super().replies(orders, program, values), self.task.config.train
        return [self._lie(reply, train) if reply.device in self._liars else reply for reply in found]


def bench_liars(
    rounds: int = 60,
    seeds: Sequence[int] = (0, 1),
    overrides: Sequence[str] = (),
    lies: Sequence[str] = tuple(LIES),
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs without and with liars: final accuracies, and how many replies were refused."""
    honest, rows = [], []
    for seed in seeds:
        config = load(None, [*_SETTINGS, *overrides, f"rounds={rounds}", f"seed={seed}"])
        progress(f"seed {seed}: pruning")
        task, population = prepare(config)
        progress(f"seed {seed}: honest")
        honest.append(_accuracy(task, SimulatedDevices(task, population))[0])
        for lie in lies:
            for tenths in SHARES:
                progress(f"seed {seed}: {lie}, {tenths} of 10")
                devices = LyingDevices(task, population, _liars(config, tenths), LIES[lie])
                accuracy, refused, why = _accuracy(task, devices)
                lost = None if accuracy is None or honest[-1] is None else honest[-1] - accuracy
                rows.append(
                    {"lie": lie, "tenths": tenths, "seed": seed, "accuracy": accuracy, "lost": lost,
                     "refused": refused, "ended": why}
                )  # fmt: skip
    return {
        "honest": honest, "rows": rows, "rounds": rounds, "seeds": list(seeds), "robust": config.train.robust,
        "bits": config.train.bits, "machine": describe_machine(),
    }  # fmt: skip


def _liars(config: Config, tenths: int) -> set[int]:
    """Every so many devices, so that they are of all sizes."""
    devices = config.data.devices
    return {at * devices // (tenths * devices // 10) for at in range(tenths * devices // 10)}


def _accuracy(task: Task, devices: SimulatedDevices) -> tuple[float | None, dict[str, int], str]:
    """Final accuracy (none where the run broke down), replies that did not count by reason, and why it broke down."""
    state, tests = ntk_baffle.init(task), []
    refused: Counter[str] = state.coordinator.refused
    try:
        for round in range(1, task.config.rounds + 1):
            if left_out := ntk_baffle.round(task, devices, state).left_out:
                refused["pulls against the others"] += len(left_out)
            left = task.config.rounds - round
            if left < 2 * _TESTS and left % 2 == 0:
                tests.append(devices.evaluate(task.program, state.values, state.stats)[0])
    except ForeseedError as error:
        return None, dict(refused), str(error)
    finally:
        devices.close()
    return float(np.mean(tests)), dict(refused), ""

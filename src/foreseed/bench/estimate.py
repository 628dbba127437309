"""How far an estimate lies from the gradient that it stands for, beside what theory says (docs/theory.md).

Everything is as in a run but for the slopes, which are exact (the limit of short probes): a device's orders, parts and
codes, the server's coefficients and directions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from foreseed.bench.estimate_law import law, noise_scale
from foreseed.bench.machine import describe_machine
from foreseed.config import load
from foreseed.coordinator.sums import Doubles
from foreseed.device.probing import Answer, Order
from foreseed.device.worker import reply_to
from foreseed.engine import project
from foreseed.engine.types import DirectionKind, split
from foreseed.methods import Task, ntk_baffle
from foreseed.methods.backprop import LocalTrainer
from foreseed.methods.protocol import Vector
from foreseed.simulate import Population, prepare
from foreseed.simulate.experiment import Prepared
from foreseed.wire import Update

Sweep = Literal["k", "spread", "bits", "density"]

_SETTINGS = (
    "data.set=digits", "data.partition=iid", "data.devices=8", "data.per_round=1", "data.min_size=100", "workers=1",
    "model.name=lenet5", "model.activation=hardswish", "model.init=kaiming", "prune.batch=32", "train.spread=1",
)  # fmt: skip
_STEP = 0.02
"""Learning rate of the exact steps before a gradient is estimated."""


class Net(NamedTuple):
    """Where a gradient is taken: a pruned network, so many exact steps after its initial values."""

    density: float = 0.1
    pruner: str = "ntk-rand"
    steps: int = 10


class Setting(NamedTuple):
    """One point of a figure: what is estimated, and how."""

    sweep: Sweep
    series: str
    net: Net
    k: int
    spread: int = 1
    bits: int = 32
    kind: DirectionKind = "gaussian"


@dataclass(frozen=True)
class Sizes:
    """What is swept over."""

    ks: Sequence[int] = (25, 100, 400, 1600, 6400)
    dense_ks: Sequence[int] = (25, 100, 400)
    spreads: Sequence[int] = (1, 4, 16, 64, 179)
    """The last one: every part a single image."""
    bits: Sequence[int] = (1, 2, 4, 8, 32)
    densities: Sequence[float] = (0.05, 0.1, 0.2, 0.5)
    """Beside the dense network."""
    k: int = 800
    """Where something else is swept."""
    passes: int = 50
    """Directions a part, where forward passes are fixed."""
    code_bytes: int = 200
    """Of codes in a reply, where bytes are fixed: float32 numbers of K = 50."""
    prune_iterations: int = 10

    def settings(self) -> list[Setting]:
        """All points, sweep by sweep."""
        pruned, start, dense = Net(), Net(steps=0), Net(1.0)
        return [
            *(Setting("k", "density 0.1, float32", pruned, k) for k in self.ks),
            *(Setting("k", "density 0.1, rademacher", pruned, k, kind="rademacher") for k in self.ks),
            *(Setting("k", "density 0.1, one bit", pruned, k, bits=1) for k in self.ks),
            *(Setting("k", "dense, float32", dense, k) for k in self.dense_ks),
            *self._spreads("K fixed, initial values", start, False, 32),
            *self._spreads("K fixed", pruned, False, 32),
            *self._spreads("passes fixed, initial values", start, True, 32),
            *self._spreads("passes fixed", pruned, True, 32),
            *self._spreads("passes fixed, one bit", pruned, True, 1),
            *(Setting("bits", "K fixed", pruned, self.k, bits=bits) for bits in self.bits),
            *(Setting("bits", "K fixed, rademacher", pruned, self.k, 1, bits, "rademacher") for bits in self.bits),
            *(Setting("bits", "bytes fixed", pruned, 8 * self.code_bytes // bits, bits=bits) for bits in self.bits),
            *(
                Setting("density", f"{pruner} mask", Net(density, pruner), self.k, kind="rademacher")
                for pruner in ("ntk-rand", "random")
                for density in self.densities
            ),
            Setting("density", "dense", dense, self.k, kind="rademacher"),
        ]

    def _spreads(self, series: str, net: Net, fixed_passes: bool, bits: int) -> Iterator[Setting]:
        for spread in self.spreads:
            k = self.passes * spread if fixed_passes else self.k
            yield Setting("spread", series, net, k, spread, bits, "rademacher")


FULL = Sizes()


class Place:
    """A network at some values with one device's images, whose gradients are known exactly."""

    def __init__(self, net: Net, task: Task, population: Population) -> None:
        coordinator = ntk_baffle.init(task).coordinator
        self.rules, self.order = coordinator.rules, coordinator.open()[0]
        self.images, self._labels = population.images(self.order.device)
        self.n, self._values = task.program.n_live, task.values.copy()
        self._trainer = LocalTrainer(task.model, task.program)
        self.parts = cache(self._parts)
        for _ in range(net.steps):
            self._values -= np.float32(_STEP) * self._parts(1)[0]
        self.gradient: Doubles = self.parts(1)[0].astype(np.float64)

    def _parts(self, spread: int) -> Vector:
        """The gradients of the parts of the images."""
        spans = split(len(self.images), spread)
        return self._trainer.gradient(self._values, self.images, self._labels, spans)[0]

    def describe(self, net: Net) -> dict[str, Any]:
        square = float(self.gradient @ self.gradient)
        rho = noise_scale(self.parts(len(self.images)).astype(np.float64))
        return {**net._asdict(), "n_live": self.n, "images": len(self.images), "gradient_square": square, "rho": rho}


def estimate(place: Place, setting: Setting, round: int) -> Vector:
    """What the server makes of one device's reply."""
    rules = replace(place.rules, k=setting.k, spread=setting.spread, bits=setting.bits, kind=setting.kind)
    message = place.order._replace(
        round=round, k=setting.k, spread=setting.spread, bits=setting.bits, rademacher=setting.kind == "rademacher"
    )
    order, gradients = Order.of(message), place.parts(setting.spread)
    differences = array("f", bytes(4 * order.k))
    for part, gradient in enumerate(gradients):
        slopes = project(order.directions(order.spans[0], part, len(gradients)), gradient)
        differences[part :: len(gradients)] = array("f", [order.sigma * slope for slope in slopes])
    reply = reply_to(message, Answer(differences, 0.0, len(place.images)), None)
    update = Update(round, b"", ntk_baffle.stein_coefficients(rules, [reply], np.ones(1)))
    return ntk_baffle.rebuilt_gradient(rules, update, place.n, map)[0]


def measure(place: Place, setting: Setting, rounds: Sequence[int]) -> dict[str, Any]:
    """Error and cosine of these rounds' estimates, with standard errors, beside the law."""
    g = place.gradient
    square = float(g @ g)
    errors, cosines = [], []
    for round in rounds:
        found = estimate(place, setting, round).astype(np.float64)
        errors.append(float(((found - g) ** 2).sum()) / square)
        cosines.append(float(found @ g) / sqrt(square * float(found @ found)))
    expected = law(place.parts(setting.spread).astype(np.float64), g, setting.k, setting.bits, setting.kind)
    (error, error_se), (cosine, cosine_se) = _mean(errors), _mean(cosines)
    progress, progress_se = _mean([square * cosine**2 for cosine in cosines])
    return {
        **setting._asdict(), "net": setting.net._asdict(), "n_live": place.n,
        "error": error, "error_se": error_se, "error_law": expected.error,
        "cosine": cosine, "cosine_se": cosine_se, "cosine_law": expected.cosine,
        "progress": progress, "progress_se": progress_se, "progress_law": square * expected.cosine**2,
    }  # fmt: skip


def bench_estimate(
    draws: int = 8, sizes: Sizes = FULL, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Every setting's error and cosine, each the mean of so many rounds with directions of their own."""
    settings, rounds = sizes.settings(), count(1)

    @cache
    def prepared(density: float, pruner: str) -> Prepared:
        options = f"prune.density={density}", f"prune.pruner={pruner}", f"prune.iterations={sizes.prune_iterations}"
        return prepare(load(None, [*_SETTINGS, *options]))

    rows: dict[int, dict[str, Any]] = {}
    gradients = []
    for net in dict.fromkeys(setting.net for setting in settings):
        progress(f"{net.pruner} mask of density {net.density:g}, {net.steps} steps")
        place = Place(net, *prepared(net.density, net.pruner))
        gradients.append(place.describe(net))
        for i, setting in enumerate(settings):
            if setting.net == net:
                rows[i] = measure(place, setting, [next(rounds) for _ in range(draws)])
    return {
        "rows": [rows[i] for i in range(len(settings))],
        "gradients": gradients,
        "draws": draws,
        "machine": describe_machine(),
    }


def _mean(numbers: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(np.mean(numbers)), float(np.std(numbers, ddof=1)) / sqrt(len(numbers))

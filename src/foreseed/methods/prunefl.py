"""PruneFL (Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices).

    Initial pruning:  one device trains the dense model on its own images, and reconfigures it now and then, until the
                      density has settled; weights and mask go to the server
    Further pruning:  rounds of FedAvg under the mask; every so many rounds devices send the squares of their gradients,
                      of pruned weights too, and the server reconfigures

    Reconfigure:  g2 <- the squares of all weights' gradients, added up; t <- the time that a weight of each layer takes
                  K <- the weights that stay: all but the smallest few of each layer
                  while any other weight has g2 / t > Gamma = sum over K of g2 / (c + sum over K of t):
                      add the one with the largest g2 / t to K, be it a weight that lived or a pruned one
                  the mask is K

Gamma is how much a step reduces the loss (to first order, the gradient's square) in a second; the loop finds its
maximum. There is no density to set: it follows from the gradients and the times. Biases and norm parameters stay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from foreseed.config import ConfigError, Method, Table, enter
from foreseed.draws import Draws
from foreseed.engine import Engine, Samples
from foreseed.meter import DeviceMemory, Work, bp_memory
from foreseed.methods import fedavg, moving_mask
from foreseed.methods.fedavg import aggregate, begin
from foreseed.methods.moving_mask import Layout, Live, largest, layers_kept, start
from foreseed.methods.protocol import UNSAVED, Devices, Local, RoundResult, Traffic, Vector
from foreseed.methods.task import Task

Floats = npt.NDArray[np.float64]

_THAN_CHANCE = 1.5
"""Times as often as by chance an image must be told before gradients say which weights matter."""
_LOOK = 10
"""Initial rounds from one look at that accuracy to the next."""
_SETTLED, _TIMES = 0.1, 5
"""Initial pruning is over when the density has moved by no more than this share, so many times in a row."""
_REPEATS = 5
"""Times that the engine is timed; the shortest counts, since nothing but other work makes it longer."""


class Settings(Table):
    """The keys of [prunefl]."""

    every: int = Field(
        default=50,
        ge=1,
        le=2**31,
        description="rounds from one reconfiguration to the next, initial ones too: fewer adapt sooner and send more",
    )
    removable: float = Field(
        default=0.3, gt=0, lt=1, description="share of a layer that one reconfiguration may drop: more is bolder"
    )
    half_life: float = Field(
        default=10_000.0,
        gt=0,
        le=10**9,
        description="rounds in which removable halves: a short one lets the mask settle early",
    )
    initial_rounds: int = Field(
        default=1000, ge=0, le=2**31, description="of initial pruning, at most: more find a better mask; 0 starts dense"
    )
    initial_images: int = Field(
        default=200, ge=1, le=2**31, description="of the first device, in initial pruning: more judge better, and cost"
    )
    max_density: float = Field(
        default=1.0, gt=0, le=1, description="a cap, to compare at equal density; 1 leaves the density to the objective"
    )
    times: Literal["macs", "measured"] = Field(
        default="macs",
        description="of weights: macs counts them, always alike; measured times this machine's engine as a run starts",
    )
    macs_per_second: float = Field(
        default=1e9,
        ge=1,
        le=1e18,
        description="of a device, for macs: a faster one lets bytes decide; 1e9 is a Raspberry Pi 4",
    )
    bytes_per_second: float = Field(
        default=1.44e6,
        ge=1,
        le=1e18,
        description="of a device's link: a slower one makes all weights cost alike (authors: 1.44e6)",
    )
    fixed_share: float = Field(
        default=0.42,
        ge=0,
        lt=1,
        description="of a dense round's time that no pruning saves: more keeps more weights (authors: 0.42 and 0.12)",
    )
    compat: bool = Field(
        default=False, description="true does as the port in FedDST's code, whose mask goes dense (docs/methods.md)"
    )


@dataclass(kw_only=True)
class State(moving_mask.State):
    """What goes from round to round."""

    layout: Layout = field(metadata=UNSAVED)
    seconds: Floats
    """Of one weight of each layer for one image, forward and backward; kept, since no two measurements agree."""


class Times(NamedTuple):
    """What weights cost in a round."""

    layers: Floats
    """Seconds of one weight of each layer."""
    constant: float
    """Seconds that no pruning saves."""


class Update(NamedTuple):
    """What one device comes back with."""

    samples: int
    values: Vector
    stats: Vector
    loss: float
    gradient: Vector
    """Of all minibatches together; empty if nobody asked for it."""


class Pruned(NamedTuple):
    """What initial pruning comes to."""

    weights: Vector
    stats: Vector
    live: Live
    work: Work


def init(task: Task) -> State:
    """Dense; initial pruning, which needs a device, begins the first round."""
    config, own, layout = task.config, task.config.own(Settings), Layout(task.program)
    if own.every > config.rounds:
        raise ConfigError(
            f"prunefl.every = {own.every} is longer than the run of {config.rounds} rounds, so nothing would be "
            "reconfigured; lower it or raise rounds"
        )
    if own.max_density < 1 and not own.initial_rounds:
        raise ConfigError(
            f"prunefl.max_density = {own.max_density}, but without initial rounds the model starts dense; raise "
            "prunefl.initial_rounds"
        )
    if int(own.max_density * layout.n_weights) < len(layout.layers):
        raise ConfigError(
            f"prunefl.max_density = {own.max_density} leaves less than a weight for each of {len(layout.layers)} "
            "layers; raise it"
        )
    if own.times == "measured":
        seconds = measured_seconds(task, layout)
    else:
        seconds = 3 * np.array([layer.macs_per_weight for layer in layout.layers]) / own.macs_per_second
    return State(**vars(start(task, layout, layout.everything)), layout=layout, seconds=seconds)


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round of FedAvg under the mask; before the first, initial pruning; every so often, reconfiguration."""
    config, own, t, layout = task.config, task.config.own(Settings), task.config.train, state.layout
    number = state.done + 1
    times = times_of(own, layout, state.seconds, t.epochs * float(devices.sizes().mean()))
    work, up, down = Work(), 0, 0
    if number == 1 and own.initial_rounds:
        first = [int(np.argmax(devices.sizes()))]  # whoever has most images
        [pruned] = devices.visit(task.program, first, lambda local: initial_pruning(task, layout, times, local))
        # The dense values down; what lives, and the mask, up.
        down, up = layout.value_bytes(layout.everything), layout.value_bytes(pruned.live) + layout.mask_bytes
        work = pruned.work
        state.move(layout, pruned.weights, pruned.live, t.ema)
        state.stats = pruned.stats

    lr, chosen = begin(config, number)
    due = number % own.every == 0
    updates = list(devices.visit(task.program, chosen, lambda local: client_update(task, state, lr, due, local)))
    samples = sum(u.samples for u in updates)

    # Down: live values; the mask too, to whoever has another. Up: live values, and a square for every value if due.
    down += len(chosen) * layout.value_bytes(state.live) + state.send(chosen) * layout.mask_bytes
    up += len(chosen) * (layout.value_bytes(state.live) + (4 * layout.n if due else 0))
    work += _work(layout, state.live, t.epochs * samples, dense_gradients=due)

    weights = aggregate((u.samples, u.values) for u in updates)
    live = state.live
    if due:
        if own.compat:
            mean = sum((u.gradient.astype(np.float64) for u in updates), np.zeros(layout.n)) / len(updates)
            live = port_mask(layout, np.square(mean), times, own.removable * 0.5 ** (number - 1))
        else:
            squares = sum((u.samples * u.gradient.astype(np.float64) ** 2 for u in updates), np.zeros(layout.n))
            removable = own.removable * 0.5 ** ((number - 1) / own.half_life)
            live = reconfigured(layout, weights, live, squares, times, removable, own.max_density)
    state.move(layout, weights, live, t.ema)
    state.stats = aggregate((u.samples, u.stats) for u in updates)
    state.done = number
    return RoundResult(
        round=number,
        lr=lr,
        train_loss=fsum(u.samples * u.loss for u in updates) / samples,
        participants=chosen,
        samples=samples,
        work=work,
        traffic=Traffic(up, down),
    )


# --- times ---


def times_of(own: Settings, layout: Layout, seconds: Floats, images: float) -> Times:
    """What weights cost a device that trains on so many images a round: computing, and four bytes each way."""
    layers = seconds * images + 8 / own.bytes_per_second
    dense = fsum(s * layer.size for s, layer in zip(layers, layout.layers, strict=True))
    return Times(layers, dense * own.fixed_share / (1 - own.fixed_share))


def measured_seconds(task: Task, layout: Layout) -> Floats:
    """What a weight of each layer takes the sparse engine for one image, forward and (twice that) backward.

    Timed with half of all weights, and again with nearly none of one layer: the difference is what the layer's half
    takes. Where that is lost in the noise, a tenth of what its MACs would take at the engine's mean pace.
    """
    images = Samples.records(task.test, task.program.image_bytes)
    images = images.part(0, min(images.count, 256))
    stats = task.stats if task.stats.size else None
    scores = Draws(task.config.seed, "prunefl", "times").uniforms(layout.n).astype(np.float32)
    halves = [max(1, layer.size // 2) for layer in layout.layers]

    def seconds(counts: Sequence[int]) -> float:
        live = layers_kept(layout, scores, counts)
        engine, best = Engine(layout.pruned(live), batch=32), float("inf")
        for _ in range(_REPEATS):
            began = time.perf_counter()
            engine.loss(task.values[live], images, stats)
            best = min(best, time.perf_counter() - began)
        return best / images.count

    base = seconds(halves)
    pace = base / layout.macs(layers_kept(layout, scores, halves))
    found = []
    for number, (layer, half) in enumerate(zip(layout.layers, halves, strict=True)):
        without = seconds([1 if n == number else count for n, count in enumerate(halves)])
        found.append(max((base - without) / max(1, half - 1), 0.1 * pace * layer.macs_per_weight))
    return 3 * np.array(found)


# --- initial pruning, at one device ---


def initial_pruning(task: Task, layout: Layout, times: Times, local: Local) -> Pruned:
    """Train on some of the device's images and reconfigure, until the density has settled."""
    config, own, t = task.config, task.config.own(Settings), task.config.train
    some = Draws(config.seed, "prunefl", "initial images").permutation(len(local.images))[: own.initial_images]
    images, labels = local.images[some], local.labels[some]
    weights, stats, live = task.values, task.stats, layout.everything
    squares, work, done, learns = np.zeros(layout.n), Work(), 0, False
    densities: list[float] = []

    def add(gradient: Vector) -> None:
        np.add(squares, gradient.astype(np.float64) ** 2, out=squares)

    while done < own.initial_rounds and not settled(densities):
        epochs = min(own.every if learns else _LOOK, own.initial_rounds - done)
        trained = local.trainer.train(
            weights, images, labels, epochs=epochs, batch=t.batch, lr=t.lr, momentum=t.momentum,
            weight_decay=t.weight_decay, seed=(config.seed, 0, local.device, done), stats=stats, live=live,
            each_step=add,
        )  # fmt: skip
        weights, stats, done = trained.values, trained.stats, done + epochs
        work += _work(layout, live, epochs * len(images), dense_gradients=True)
        if not learns:
            accuracy = local.trainer.test(weights, images, labels, stats if stats.size else None)[1]
            learns = accuracy >= _THAN_CHANCE / task.program.classes
            work += layout.work(live, len(images))
        if learns or done == own.initial_rounds:
            if own.compat:
                live = port_mask(layout, squares, times, own.removable)
            else:
                live = reconfigured(layout, weights, live, squares, times, own.removable, own.max_density)
            weights = np.where(live, weights, np.float32(0))
            densities.append(layout.density(live))
            squares[:] = 0
    return Pruned(weights, stats, live, work)


def settled(densities: Sequence[float]) -> bool:
    """Whether the density has hardly moved for some time."""
    last = densities[-_TIMES - 1 :]
    return len(last) > _TIMES and all(abs(now / before - 1) <= _SETTLED for before, now in pairwise(last))


# --- rounds ---


def client_update(task: Task, state: State, lr: float, due: bool, local: Local) -> Update:
    """Local training under the mask; if due, the gradient of all minibatches together, of pruned weights too."""
    compat = task.config.own(Settings).compat
    gradient = np.zeros(state.layout.n if due else 0, np.float32)

    def add(step: Vector) -> None:
        if compat:  # the port takes the last minibatch alone
            gradient[:] = step
        else:
            np.add(gradient, step, out=gradient)

    trained = fedavg.client_update(
        task.config, state.done + 1, lr, local, state.weights, state.stats, live=state.live,
        each_step=add if due else None,
    )  # fmt: skip
    return Update(len(local.images), trained.values, trained.stats, trained.loss, gradient)


# --- reconfiguration ---


def reconfigured(
    layout: Layout,
    weights: Vector,
    live: Live,
    squares: Floats,
    times: Times,
    removable: float,
    max_density: float = 1.0,
) -> Live:
    """The mask that makes Gamma largest, among those that keep all but the `removable` smallest of each layer."""
    most = int(max_density * layout.n_weights)
    # Under a cap what stays leaves room for removable's share of the cap, for gradients to fill.
    fits = min(1.0, max_density / layout.density(live))
    mask = layout.everything.copy()
    for layer in layout.layers:
        n = int(live[layer.at].sum())
        stay = max(1, int(fits * (n - int(removable * n))))
        mask[layer.at] = largest(np.abs(weights[layer.at]), stay, among=live[layer.at])
    seconds = _seconds(layout, times)
    others = np.flatnonzero(~mask)
    value = squares[others] / seconds[others]
    order = np.argsort(-value, kind="stable")
    others, value = others[order], value[order]
    gain = squares[mask].sum() + np.concatenate([[0.0], np.cumsum(squares[others])])
    cost = times.constant + seconds[mask].sum() + np.concatenate([[0.0], np.cumsum(seconds[others])])
    # Values fall and Gamma rises until they meet.
    stops = np.flatnonzero(value <= (gain / cost)[:-1])
    added = int(stops[0]) if len(stops) else len(others)
    room = most - sum(int(mask[layer.at].sum()) for layer in layout.layers)
    mask[others[: max(0, min(added, room))]] = True
    return mask


def port_mask(layout: Layout, squares: Floats, times: Times, removable: float) -> Live:
    """The mask as FedDST's port of PruneFL finds it: weights by g2 alone, and at least all but `removable` of them."""
    seconds = _seconds(layout, times)
    weights = np.flatnonzero(seconds)
    weights = weights[np.argsort(-squares[weights], kind="stable")]
    gain = np.concatenate([[0.0], np.cumsum(squares[weights])])[:-1]
    cost = _PORT_CONSTANT + np.concatenate([[0.0], np.cumsum(seconds[weights])])[:-1]
    enough = np.arange(len(weights)) > (1 - removable) * len(weights)
    stops = np.flatnonzero((squares[weights] / seconds[weights] < gain / cost) & enough)
    mask = layout.everything.copy()
    if len(stops):
        mask[weights[stops[0] :]] = False
    return mask


_PORT_CONSTANT = 0.2
"""Seconds that no pruning saves, in the port."""


def _seconds(layout: Layout, times: Times) -> Floats:
    """Of every weight; 0 of what is never pruned."""
    seconds = np.zeros(layout.n)
    for layer, each in zip(layout.layers, times.layers, strict=True):
        seconds[layer.at] = each
    return seconds


# --- what it costs a device ---


def _work(layout: Layout, live: Live, images: int, dense_gradients: bool) -> Work:
    """Forward, and backward to the inputs and to the weights; the last may be to pruned weights too."""
    to_weights = layout.everything if dense_gradients else live
    return layout.work(live, 2 * images) + layout.work(to_weights, images)


def device_memory(task: Task, state: State) -> DeviceMemory:
    """Dense tensors, the mask, and the gradients that are added up before a reconfiguration."""
    t, layout = task.config.train, state.layout
    held = layout.mask_bytes + 4 * layout.n
    return bp_memory(state.program, t.batch, t.momentum > 0, held, "the mask, and gradients added up")


enter(
    Method(
        "prunefl", "sparse, the server moves the mask by gradients and times, backpropagation", init, round,
        device_memory, backpropagates=True, settings=Settings,
    )
)  # fmt: skip

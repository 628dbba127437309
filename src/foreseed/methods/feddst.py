"""FedDST (Bibikar et al., Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning Better).

    Server:  initialise w; m <- the largest weights of each layer, as many as its share of the density
             for each round t: S_t <- a random set of devices
                               for each device k of S_t in parallel: w_k, m_k <- ClientUpdate(k, w, m)
                               w <- sum over k of n_k m_k w_k / sum over k of n_k m_k, weight by weight
                               m <- of the weights that any device has, the largest of each layer, as many as before
    ClientUpdate(k, w, m):  E epochs of minibatch SGD under m; every so many rounds, after one of the epochs,
                            prune the share alpha_t of what lives, the smallest weights of each layer, and
                            grow as many, from 0, where the gradient of the last minibatch is largest

alpha_t falls from alpha to 0 along half a cosine. Biases and norm parameters are never pruned. A device's momentum
starts anew each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import cos, fsum, pi
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from foreseed.config import ConfigError, Method, Table, enter
from foreseed.meter import DeviceMemory, Work, bp_memory
from foreseed.methods import fedavg, moving_mask
from foreseed.methods.fedavg import aggregate, begin
from foreseed.methods.moving_mask import Layer, Layout, Live, largest, layers_kept, masked_mean, start
from foreseed.methods.protocol import UNSAVED, Devices, Local, RoundResult, Traffic, Vector
from foreseed.methods.task import Task


class Settings(Table):
    """The keys of [feddst]."""

    distribution: Literal["feddst", "uniform", "erk"] = Field(
        default="feddst",
        description="density by layer: feddst is the authors', nearly uniform; erk, RigL's, keeps small layers, costs",
    )
    every: int = Field(
        default=15, ge=1, le=2**31, description="rounds from one readjustment to the next: fewer explore more masks"
    )
    ratio: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="alpha, share of live weights that move: more explore more and forget more; 0 keeps the first mask",
    )
    decay_end: int = Field(
        default=0, ge=0, le=2**31, description="rounds after which ratio has fallen to 0 and the mask rests; 0 = half"
    )
    epoch: int = Field(
        default=0,
        ge=0,
        le=2**31,
        description="local epoch to readjust after: an early one trains what grew; 0 = the last, as the authors ran it",
    )
    compat: bool = Field(
        default=False, description="true does as the authors' code where it differs (docs/methods.md), to compare"
    )


@dataclass(kw_only=True)
class State(moving_mask.State):
    """What goes from round to round."""

    layout: Layout = field(metadata=UNSAVED)
    counts: list[int] = field(metadata=UNSAVED)
    """Weights that live in each layer."""
    epochs: npt.NDArray[np.int64]
    """Local epochs of each device so far."""


class Update(NamedTuple):
    """What one device comes back with."""

    samples: int
    values: Vector
    stats: Vector
    loss: float
    live: Live
    readjusted: int
    """How often it has readjusted."""


def init(task: Task) -> State:
    """Initialise w, and keep the largest of each layer."""
    config, own = task.config, task.config.own(Settings)
    layout = Layout(task.program)
    counts = layer_counts(layout, config.prune.density, own.distribution)
    for layer, count in zip(layout.layers, counts, strict=True):
        if not count:
            raise ConfigError(
                f"prune.density = {config.prune.density} leaves no weight of {layer.name} with feddst.distribution = "
                f'"{own.distribution}"; raise prune.density'
            )
    first = 2 if own.compat else own.every
    if own.ratio and (first > config.rounds or not ratio_at(own, first, config.rounds)):
        raise ConfigError(
            f"feddst.every = {own.every}, but masks rest after {_decay_end(own, config.rounds)} of {config.rounds} "
            "rounds (feddst.decay_end), so none would ever move; lower feddst.every or raise rounds"
        )
    if own.epoch > config.train.epochs:
        raise ConfigError(
            f"feddst.epoch = {own.epoch}, but a device trains for train.epochs = {config.train.epochs}; lower it, or "
            "leave it out to readjust after the last"
        )
    begun = start(task, layout, layers_kept(layout, np.abs(task.values), counts))
    return State(**vars(begun), layout=layout, counts=counts, epochs=np.zeros(config.data.devices, np.int64))


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round: sample, ClientUpdate on each device, average each weight over those that have it, prune again."""
    config, t, layout = task.config, task.config.train, state.layout
    number = state.done + 1
    lr, chosen = begin(config, number)
    updates = list(devices.visit(task.program, chosen, lambda local: client_update(task, state, lr, local)))

    # Down: live values; the mask too, to whoever has another. Up: live values, and a mask that has moved.
    down = len(chosen) * layout.value_bytes(state.live) + state.send(chosen) * layout.mask_bytes
    up = sum(layout.value_bytes(u.live) + (layout.mask_bytes if u.readjusted else 0) for u in updates)
    work = sum((_work(layout, state.live, t.epochs, t.batch, u) for u in updates), Work())
    state.epochs[chosen] += t.epochs

    weights, live = combine(task, state, updates)
    state.move(layout, weights, live, t.ema)
    state.stats = aggregate((u.samples, u.stats) for u in updates)
    state.done = number
    samples = sum(u.samples for u in updates)
    return RoundResult(
        round=number,
        lr=lr,
        train_loss=fsum(u.samples * u.loss for u in updates) / samples,
        participants=chosen,
        samples=samples,
        work=work,
        traffic=Traffic(up, down),
    )


# --- densities by layer ---


def layer_densities(layout: Layout, density: float, distribution: str) -> list[float]:
    """The share of each layer's weights that lives.

    With r = (in + out + sum of kernel) / weights of the layer: "erk" makes the density proportional to r, and layers
    that would have more than all their weights dense; "feddst" makes the sparsity proportional to 1 - r.
    """
    sizes = np.array([layer.size for layer in layout.layers], np.float64)
    r = np.array([_edges(layer) for layer in layout.layers]) / sizes
    if distribution == "uniform":
        return [density] * len(sizes)
    if distribution == "feddst":
        # Where r is above 1, a layer is smaller than its own edges; it stays dense.
        sparsities = np.maximum(1 - r, 0)
        return list(1 - sparsities * ((1 - density) * sizes.sum() / max((sparsities * sizes).sum(), 1e-300)))
    dense = np.zeros(len(sizes), bool)
    while True:
        rest = density * sizes.sum() - sizes[dense].sum()
        densities = np.where(dense, 1.0, r * rest / max((r * sizes)[~dense].sum(), 1e-300))
        if not (densities > 1).any():
            return list(densities)
        dense |= densities > 1


def _edges(layer: Layer) -> int:
    """in + out + sum of kernel; a layer that uses each weight once an image is fully connected and has no kernel."""
    if layer.macs_per_weight == 1:
        return layer.shape[0] + layer.size // layer.shape[0]
    return sum(layer.shape)


def layer_counts(layout: Layout, density: float, distribution: str) -> list[int]:
    """The weights that live in each layer; together as many as the density says, to the weight."""
    sizes = np.array([layer.size for layer in layout.layers])
    exact = np.clip(layer_densities(layout, density, distribution), 0, 1) * sizes
    counts = np.floor(exact).astype(np.int64)
    missing = int(np.rint(density * layout.n_weights)) - int(counts.sum())
    # The largest fractions are rounded up.
    for layer in np.argsort(counts - exact, kind="stable"):
        if missing > 0 and counts[layer] < sizes[layer]:
            counts[layer] += 1
            missing -= 1
    return [int(count) for count in counts]


# --- ClientUpdate ---


def ratio_at(own: Settings, number: int, rounds: int) -> float:
    """alpha_t: the share of live weights that devices move in a round; 0 in most rounds."""
    # The authors count rounds from 0, and readjust in the second first.
    due = (number - 2) % own.every == 0 if own.compat else number % own.every == 0
    passed, end = number - 1, _decay_end(own, rounds)
    if not due or passed >= end:
        return 0.0
    # The authors compute the decay, but prune by the ratio that has not decayed.
    return own.ratio if own.compat else own.ratio / 2 * (1 + cos(pi * passed / end))


def _decay_end(own: Settings, rounds: int) -> int:
    return own.decay_end or max(1, rounds // 2)


def readjusts_after(own: Settings, epochs: int, before: int) -> set[int]:
    """The local epochs after which a device readjusts, which has trained for so many before."""
    if own.compat:  # the tenth epoch of a device's life, the twentieth, and so on
        return {epoch for epoch in range(1, epochs + 1) if (before + epoch) % 10 == 0}
    return {own.epoch or epochs}


def client_update(task: Task, state: State, lr: float, local: Local) -> Update:
    """Local training under the server's mask, and a readjustment if one is due."""
    config, own, t, layout = task.config, task.config.own(Settings), task.config.train, state.layout
    live, readjusted = state.live, 0
    due: set[int] = set()
    if alpha := ratio_at(own, state.done + 1, config.rounds):
        fewer = layer_counts(layout, config.prune.density * (1 - alpha), own.distribution)
        due = readjusts_after(own, t.epochs, int(state.epochs[local.device]))

    def each_epoch(epoch: int, values: Vector, gradient: Vector) -> Live | None:
        nonlocal live, readjusted
        if epoch not in due:
            return None
        readjusted += 1
        live = readjust(layout, values, gradient, live, fewer, state.counts, grow_anywhere=own.compat)
        return live

    trained = fedavg.client_update(
        config, state.done + 1, lr, local, state.weights, state.stats, live=state.live,
        each_epoch=each_epoch if due else None,
    )  # fmt: skip
    return Update(len(local.images), trained.values, trained.stats, trained.loss, live, readjusted)


def readjust(
    layout: Layout,
    weights: Vector,
    gradient: Vector,
    live: Live,
    fewer: Sequence[int],
    counts: Sequence[int],
    grow_anywhere: bool = False,
) -> Live:
    """Prune every layer to the largest `fewer` weights, and grow it to `counts` where the gradient is largest.

    What grows is written as 0. With `grow_anywhere`, as in the authors' code, weights that live may be chosen to grow:
    they lose what they had learnt, and the layer ends with less than its count.
    """
    moved = layout.everything.copy()
    for layer, few, count in zip(layout.layers, fewer, counts, strict=True):
        w, before = weights[layer.at], live[layer.at]
        if not grow_anywhere:
            # No more than can be replaced: a layer that is dense stays as it is.
            few = min(count, max(few, 2 * count - layer.size))
        kept = largest(np.abs(w), few, among=before)
        grown = largest(np.abs(gradient[layer.at]), count - int(kept.sum()), among=None if grow_anywhere else ~kept)
        w[grown] = 0
        moved[layer.at] = kept | grown
    return moved


# --- the server ---


def combine(task: Task, state: State, updates: Sequence[Update]) -> tuple[Vector, Live]:
    """Each weight's mean over the devices that have it; then the layers are pruned to their counts again."""
    own, batch, layout = task.config.own(Settings), task.config.train.batch, state.layout
    # The authors weigh a device by its batches, twice each, where they mean its images.
    votes = [2 * -(-u.samples // batch) if own.compat else u.samples for u in updates]
    mean = masked_mean(
        ((vote, u.values, u.live) for vote, u in zip(votes, updates, strict=True)), np.zeros_like(state.weights)
    )
    if not any(u.readjusted for u in updates):
        return mean, state.live
    voted = np.zeros(layout.n)
    for vote, u in zip(votes, updates, strict=True):
        voted += vote * u.live
    if own.compat and layout.density(voted > 0) <= task.config.prune.density:
        return mean, voted > 0
    return mean, prune_again(layout, mean, voted, state.counts)


def prune_again(layout: Layout, weights: Vector, votes: npt.NDArray[np.float64], counts: Sequence[int]) -> Live:
    """Of the weights with votes the largest of each layer; of equal ones (all that grew last are 0) the most voted."""
    live = layout.everything.copy()
    for layer, count in zip(layout.layers, counts, strict=True):
        held = np.flatnonzero(votes[layer.at])
        order = np.lexsort((-votes[layer.at][held], -np.abs(weights[layer.at][held])))
        live[layer.at] = False
        live[layer.at][held[order[:count]]] = True
    return live


# --- what it costs a device ---


def _work(layout: Layout, live: Live, epochs: int, batch: int, update: Update) -> Work:
    """Training under the mask; a readjustment needs the last minibatch's gradients of pruned weights too."""
    last = (update.samples - 1) % batch + 1
    dense = 2 * last * update.readjusted * (layout.macs(layout.everything) - layout.macs(live))
    return layout.work(live, 3 * epochs * update.samples) + Work(0, dense, 0)


def device_memory(task: Task, state: State) -> DeviceMemory:
    """Dense tensors, and the mask: the gradients that a readjustment looks at are there anyway."""
    t = task.config.train
    return bp_memory(state.program, t.batch, t.momentum > 0, state.layout.mask_bytes, "the mask")


enter(
    Method(
        "feddst", "sparse, devices move the mask, backpropagation", init, round, device_memory,
        backpropagates=True, settings=Settings,
    )
)  # fmt: skip

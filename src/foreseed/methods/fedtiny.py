"""FedTiny (Huang et al., Distributed Pruning Towards Tiny Neural Networks in Federated Learning, ICDCS 2023).

    Adaptive batch-norm selection, once, before the first training:
        Server:   a pool of coarse masks of the same density, which they share out over the layers in different ways
        Devices:  of each, the batch norms' statistics over their own images; the server takes their means
        Devices:  of each with these means, the loss; the server takes the mask whose mean loss is lowest
    Every round:  FedAvg under the mask
    Progressive pruning, every dR rounds up to R_stop, one block of layers at a time, from the last to the first:
        Devices:  after training, of each layer l of the block the a_l largest gradients of pruned weights, with their
                  places, from one minibatch: a buffer of a_l entries is all they need
        Server:   grows the a_l weights whose mean gradient is largest (from 0), drops the a_l smallest others
                  a_l = alpha / 2 (1 + cos(pi t / R_stop)) of the layer's live weights in round t

A gradient that a device did not send counts as 0. Without batch norms there are no statistics to refresh, and masks are
selected by the loss alone.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from math import cos, exp, fsum, pi
from typing import NamedTuple

import numpy as np
from pydantic import Field

from foreseed.config import ConfigError, Method, Table, enter
from foreseed.config.schema import Count
from foreseed.draws import Draws
from foreseed.engine import Engine, Samples
from foreseed.meter import DeviceMemory, Work, bp_memory
from foreseed.methods import fedavg
from foreseed.methods.fedavg import aggregate, begin
from foreseed.methods.layer_counts import share_out
from foreseed.methods.moving_mask import Layer, Layout, Live, State, largest, layers_kept, start
from foreseed.methods.protocol import Devices, Local, RoundResult, Traffic, Vector
from foreseed.methods.task import Task, records

Quotas = Sequence[tuple[Layer, int]]
"""How many weights of which layers move."""


class Settings(Table):
    """The keys of [fedtiny]."""

    candidates: int = Field(
        default=5, ge=1, le=1000, description="coarse masks to select from: each is a download and two tests, once"
    )
    noise: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="layer densities of candidates stray by up to e to this: 0 tries two alone",
    )
    every: Count = Field(default=10, description="rounds from one move of the mask to the next")
    until: Count = Field(default=100, description="the last round in which the mask may move: later ones settle")
    share: float = Field(
        default=0.2, gt=0, lt=1, description="alpha, of a layer's live weights that move at first: more explore more"
    )
    blocks: Count = Field(
        default=5, description="layers move in so many blocks, one at a time: more need less of a device; 1: all"
    )


class Report(NamedTuple):
    """What a device comes back with."""

    samples: int
    values: Vector
    stats: Vector
    loss: float
    gradient: Vector
    """The largest of pruned weights, 0 in all other places; empty if none were asked for."""


def init(task: Task) -> State:
    """The drawn weights under the first candidate, until devices have selected one."""
    settings, rounds = task.config.own(Settings), task.config.rounds
    if not settings.every <= settings.until <= rounds:
        raise ConfigError(
            f"fedtiny.every = {settings.every}, fedtiny.until = {settings.until} and rounds = {rounds}: the mask has "
            "to move, and to come to rest within the run; lower fedtiny.every or fedtiny.until, or raise rounds"
        )
    layout = Layout(task.program)
    first = candidate_masks(task, layout)[0]
    return start(task, layout, first, known=False)


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round: selection before the first, FedAvg under the mask, and now and then progressive pruning."""
    number, t = state.done + 1, task.config.train
    lr, chosen = begin(task.config, number)
    layout = Layout(task.program)
    work, (up, down, _) = select(task, devices, layout, chosen, state) if number == 1 else (Work(), Traffic(0, 0))
    live, moving = state.live, quotas(task.config.own(Settings), layout, state.live, number)

    def client_update(local: Local) -> Report:
        trained = fedavg.client_update(task.config, number, lr, local, state.weights, state.stats, live=live)
        gradient = np.zeros(0, np.float32)
        if moving:
            rows = Draws(task.config.seed, number, local.device, "growth").permutation(len(local.images))[: t.batch]
            [dense], _ = local.trainer.gradient(
                trained.values, local.images[rows], local.labels[rows], [(0, len(rows))]
            )
            gradient = top_gradients(dense, live, moving)
        return Report(len(local.images), trained.values, trained.stats, trained.loss, gradient)

    reports = list(devices.visit(task.program, chosen, client_update))
    weights = aggregate((report.samples, report.values) for report in reports)
    state.stats = aggregate((report.samples, report.stats) for report in reports)
    # Live values and statistics both ways; the mask to those that hold another; places and gradients of what may grow.
    pairs = sum(count for _, count in moving)
    traffic = Traffic(
        up + len(reports) * (layout.value_bytes(live) + 8 * pairs),
        down + len(reports) * layout.value_bytes(live) + state.send(chosen) * layout.mask_bytes,
    )
    for report in reports:
        work += layout.work(live, 3 * t.epochs * report.samples)
        work += growth_work(layout, live, moving, min(t.batch, report.samples))
    if moving:
        gradient = aggregate((report.samples, report.gradient) for report in reports)
        live = readjusted(live, weights, gradient, moving)
    state.move(layout, weights, live, t.ema)
    state.done = number
    samples = sum(report.samples for report in reports)
    return RoundResult(
        round=number,
        lr=lr,
        train_loss=fsum(report.samples * report.loss for report in reports) / samples,
        participants=chosen,
        samples=samples,
        work=work,
        traffic=traffic,
    )


# Adaptive batch-norm selection.


def candidate_masks(task: Task, layout: Layout) -> list[Live]:
    """The pool: the largest weights of each layer, by equal densities, by Erdos-Renyi's, and by random ones."""
    settings = task.config.own(Settings)
    odds = [[1.0 for _ in layout.layers], [sum(layer.shape) / layer.size for layer in layout.layers]]
    for number in range(2, settings.candidates):
        drawn = Draws(task.config.seed, "fedtiny candidate", number).uniforms(len(layout.layers))
        odds.append([exp(settings.noise * (2 * uniform - 1)) for uniform in drawn])
    total = builtins.round(task.config.prune.density * layout.n_weights)
    counts = [share_out(layout.layers, some, total) for some in odds[: settings.candidates]]
    return [layers_kept(layout, np.abs(task.values), some) for some in counts]


def select(task: Task, devices: Devices, layout: Layout, chosen: Sequence[int], state: State) -> tuple[Work, Traffic]:
    """Have devices select a candidate, and start from it and its statistics; what that took of all of them."""
    masks = candidate_masks(task, layout)
    pool = [(layout.pruned(live), task.values[live]) for live in masks]

    def engines(local: Local) -> Iterator[tuple[Engine, Vector, Samples]]:
        samples = Samples.records(records(local.images, local.labels), task.program.image_bytes)
        return ((Engine(program, batch=task.config.train.batch), values, samples) for program, values in pool)

    def refresh(local: Local) -> tuple[int, Vector]:
        found = [np.array(engine.batch_stats(values, samples)) for engine, values, samples in engines(local)]
        return len(local.images), np.concatenate(found)

    stats = [state.stats] * len(pool)
    if task.program.n_stats:
        stats = np.split(aggregate(devices.visit(task.program, chosen, refresh)), len(pool))

    def test(local: Local) -> tuple[int, list[float]]:
        frozen = [some if some.size else None for some in stats]
        tests = zip(engines(local), frozen, strict=True)
        return len(local.images), [engine.loss(values, samples, some)[0] for (engine, values, samples), some in tests]

    tested = list(devices.visit(task.program, chosen, test))
    best = lowest([losses for _, losses in tested])
    state.stats = stats[best]
    state.move(layout, task.values, masks[best], 0.0)
    images, passes = sum(count for count, _ in tested), 2 if task.program.n_stats else 1
    work = sum((layout.work(live, passes * images) for live in masks), Work())
    # Down every candidate, which devices keep in their storage, and all mean statistics; up theirs, and the losses.
    down = sum(layout.mask_bytes + layout.value_bytes(live) for live in masks)
    return work, Traffic(len(chosen) * len(pool) * 4 * (task.program.n_stats + 1), len(chosen) * down)


def lowest(losses: Sequence[Sequence[float]]) -> int:
    """The candidate of the lowest loss, summed over all devices' images; of equal ones the first."""
    return int(np.argmin([fsum(of_devices) for of_devices in zip(*losses, strict=True)]))


# Progressive pruning.


def quotas(settings: Settings, layout: Layout, live: Live, number: int) -> Quotas:
    """The layers of the block whose turn it is, and how many weights of each move; none in most rounds."""
    if number % settings.every or number > settings.until:
        return []
    blocks = np.array_split(np.arange(len(layout.layers)), min(settings.blocks, len(layout.layers)))
    turn = (number // settings.every - 1) % len(blocks)
    share = settings.share / 2 * (1 + cos(pi * number / settings.until))
    found = []
    for layer in (layout.layers[at] for at in blocks[-1 - turn]):
        alive = int(live[layer.at].sum())
        found.append((layer, min(int(share * alive), layer.size - alive)))
    return [(layer, count) for layer, count in found if count]


def top_gradients(gradient: Vector, live: Live, moving: Quotas) -> Vector:
    """What a device reports: of each layer the largest gradients of pruned weights, and 0 in all other places."""
    report = np.zeros_like(gradient)
    for layer, count in moving:
        found = gradient[layer.at]
        report[layer.at] = np.where(largest(np.abs(found), count, ~live[layer.at]), found, np.float32(0))
    return report


def readjusted(live: Live, weights: Vector, gradient: Vector, moving: Quotas) -> Live:
    """The mask that grows the pruned weights of the largest gradients and drops as many of the smallest live ones."""
    after = live.copy()
    for layer, count in moving:
        alive = live[layer.at]
        grown = largest(np.abs(gradient[layer.at]), count, ~alive)
        dropped = largest(-np.abs(weights[layer.at]), count, alive)
        after[layer.at] = (alive & ~dropped) | grown
    return after


def growth_work(layout: Layout, live: Live, moving: Quotas, images: int) -> Work:
    """A minibatch forward and back under the mask, with the weights' gradient of the moving layers alone, but dense."""
    if not moving:
        return Work()
    gradient = builtins.round(sum(layer.macs_per_weight * layer.size for layer, _ in moving))
    dense = 3 * layout.program.dense_macs
    return Work(3 * images, 2 * images * (2 * layout.macs(live) + gradient), 2 * images * dense)


def device_memory(task: Task, state: State) -> DeviceMemory:
    """Dense tensors, and the places and values of the largest gradients while the largest block moves."""
    settings, train, layout = task.config.own(Settings), task.config.train, Layout(task.program)
    moves = [quotas(settings, layout, state.live, n) for n in range(settings.every, settings.until + 1, settings.every)]
    held = 8 * max(sum(count for _, count in moving) for moving in moves)
    return bp_memory(task.program, train.batch, train.momentum > 0, held, "the largest gradients of pruned weights")


enter(
    Method(
        "fedtiny", "sparse, a selected mask that moves block by block, backpropagation", init, round, device_memory,
        backpropagates=True, settings=Settings,
    )
)  # fmt: skip

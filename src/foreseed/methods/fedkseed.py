"""FedKSeed (Qin et al., Federated Full-Parameter Tuning of Billion-Sized Language Models with Communication Cost under
18 Kilobytes).

    Directions z_1 .. z_K are fixed for the whole run, so the model is K sums: w = w0 - sum over j of a_j z_j
    for each round: S_t <- a random set of devices; each receives a, and rebuilds w     `rebuilt`
        device k, tau times: j <- any of the pool                                       `client_update`
                             g <- (L(w + sigma z_j) - L(w - sigma z_j)) / (2 sigma) on a minibatch
                             w <- w - lr g z_j,  G_kj <- G_kj + g
                 sends (j, G_kj) for every j that it came across
        a_j <- a_j + lr sum over k of (n_k / n) G_kj

Whatever a device has missed, it receives K numbers. No device backpropagates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import fsum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from foreseed.config import Config, ConfigError, Method, Table, enter
from foreseed.draws import Draws
from foreseed.engine import SHARED_DEVICE, Directions, Program, accumulate
from foreseed.meter import DeviceMemory, bp_free_memory, forward_work
from foreseed.methods.averaging import moving_average
from foreseed.methods.backprop import minibatches
from foreseed.methods.descent import finite
from foreseed.methods.fedavg import begin
from foreseed.methods.protocol import Devices, Prober, RoundResult, Traffic, Vector
from foreseed.methods.task import Task


class Settings(Table):
    """The keys of [fedkseed]."""

    pool: int = Field(
        default=4096,
        ge=1,
        le=4096,
        description="directions of the whole run: more reach more of the weights' space, and are all sent to a device",
    )


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    values: Vector
    stats: Vector
    ema: Vector | None
    sums: Vector
    """a: how far the model has gone along each direction of the pool."""
    met: npt.NDArray[np.bool_]
    """The devices that have the program and w0."""
    done: int = 0
    """Rounds so far."""


class Sums(NamedTuple):
    """What one device comes back with."""

    samples: int
    drawn: npt.NDArray[np.int64]
    """The directions that it came across, step by step."""
    slopes: npt.NDArray[np.float64]
    loss: float
    images: int
    """That it has probed, all steps together."""


def init(task: Task) -> State:
    """w = w0."""
    t, devices = task.config.train, task.config.data.devices
    if t.weight_decay:
        raise ConfigError(f"train.weight_decay {t.weight_decay}: fedkseed's model is sums of directions; set it to 0")
    if task.program.n_stats:
        raise ConfigError("fedkseed's devices send no statistics of a BatchNorm; choose model.norm group")
    sums = np.zeros(task.config.own(Settings).pool, np.float32)
    ema = task.values if t.ema else None
    return State(task.program, task.values, task.stats, ema, sums, np.zeros(devices, bool))


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round: sample, ClientUpdate on each device, add up, rebuild."""
    config, t, number = task.config, task.config.train, state.done + 1
    lr, chosen = begin(config, number)
    work = list(devices.probe(state.program, chosen, lambda prober: client_update(task, state, prober, lr)))
    state.sums = added(state.sums, work, lr)
    state.values = finite(rebuilt(config, task.values, state.sums, devices))
    state.ema = moving_average(state.ema, state.values, t.ema)
    state.done = number
    samples = sum(one.samples for one in work)
    # Down: the sums, and at first the program and w0. Up: an index and a number for each direction that came up, or
    # the whole pool's numbers where that is less; the loss, and how many samples.
    first = sum(not state.met[device] for device in chosen) * (len(state.program.bytes) + task.values.nbytes)
    state.met[chosen] = True
    pool = state.sums.nbytes
    return RoundResult(
        round=number,
        lr=lr,
        train_loss=fsum(one.samples * one.loss for one in work) / samples,
        participants=chosen,
        samples=samples,
        # Both sides, or one and the middle.
        work=forward_work(state.program, 2 * sum(one.images for one in work)),
        traffic=Traffic(
            sum(min(8 * len(np.unique(one.drawn)), pool) + 8 for one in work), len(chosen) * pool + first
        ),
    )  # fmt: skip


def client_update(task: Task, state: State, prober: Prober, lr: float) -> Sums:
    """Steps of the device's own, each along one direction of the pool, by a minibatch."""
    config, t, number = task.config, task.config.train, state.done + 1
    draws, steps, n = Draws(config.seed, "seed pool", number, prober.device), t.local_steps, prober.samples
    drawn = (draws.words(steps) % np.uint64(len(state.sums))).astype(np.int64)
    batches = minibatches(n, -(-steps * t.batch // n) + steps, t.batch, draws)
    values, slopes, losses, images = state.values.copy(), np.zeros(steps), [], 0
    for step, (_, rows, _) in enumerate(islice(batches, steps)):
        along = _directions(config, 1, int(drawn[step]))
        (slopes[step],), loss = prober.slopes(values, rows, along, t.difference == "central")
        accumulate(values, along, np.array([-lr * slopes[step]], np.float32))
        losses.append(loss)
        images += len(rows)
    return Sums(n, drawn, slopes, fsum(losses) / steps, images)


def added(sums: Vector, work: Iterable[Sums], lr: float) -> Vector:
    """The sums with what devices found, each weighted by its samples; rounded once, to what is sent."""
    work, total = list(work), sums.astype(np.float64)
    samples = sum(one.samples for one in work)
    for one in work:
        np.add.at(total, one.drawn, lr * one.samples / samples * one.slopes)
    return total.astype(np.float32)


def rebuilt(config: Config, w0: Vector, sums: Vector, devices: Devices) -> Vector:
    """The model of some sums, to the bit as any device makes it: all directions in their order, then w0."""
    way, span = np.zeros_like(w0), max(512, -(-len(w0) // 16) // 512 * 512)  # whole blocks of the generator

    def piece(at: int) -> None:
        accumulate(way[at : at + span], _directions(config, len(sums)), sums, at)

    list(devices.map(piece, range(0, len(w0), span)))
    return w0 - way


def _directions(config: Config, count: int, first: int = 0) -> Directions:
    """Some of the pool: directions of round 0, which no round of training has."""
    t = config.train
    return Directions(config.seed, 0, SHARED_DEVICE, count, first, kind=t.direction, sigma=t.sigma)


def device_memory(task: Task, state: State) -> DeviceMemory:
    """A device that goes forward only, and keeps w0 and the pool's sums to rebuild the model from."""
    held = task.values.nbytes + state.sums.nbytes
    return bp_free_memory(state.program, state.values, task.test, 1, held, "the initial values and the pool's sums")


enter(
    Method(
        "fedkseed", "dense, a pool of seeds, forward passes only", init, round, device_memory, settings=Settings,
        only_simulated="no order names the directions of a pool",
    )
)  # fmt: skip

"""BAFFLE as its authors ran it (Feng et al., Does Federated Learning Really Need Backpropagation?; FengHZ/BAFFLE).

All C devices take part, and an estimate is that of one minibatch:

    g <- 1/K sum over k of (L(w + sigma z_k) - L(w)) / sigma z_k, then no coordinate beyond `clip`     `estimate`

    batch level, their FedSGD: each round every device sends g of its next minibatch;                  `exchange`
                               w <- Adam(w, 1/C sum of g)
    epoch level, their FedAvg: each round every device makes a step of an Adam of its own for          `epoch`
                               each of its minibatches; w <- 1/C sum of the devices' w

Once an epoch w enters a moving average for evaluation, whose decay warms up: min(ema, (1 + t) / (10 + t)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import fsum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from foreseed.config import Config, ConfigError, Method, Table, enter
from foreseed.draws import Draws
from foreseed.engine import Directions, Program, accumulate
from foreseed.engine.update import apply_step
from foreseed.meter import DeviceMemory, bp_free_memory, forward_work
from foreseed.methods.averaging import moving_average
from foreseed.methods.backprop import minibatches
from foreseed.methods.descent import finite, optimiser_of, step
from foreseed.methods.fedavg import aggregate
from foreseed.methods.protocol import Devices, Prober, RoundResult, Traffic, Vector
from foreseed.methods.task import Task

Rows = npt.NDArray[np.integer]


class Settings(Table):
    """The keys of [baffle-original]."""

    level: Literal["batch", "epoch"] = Field(
        default="batch",
        description="of a round: batch sends little and often; epoch sends weights, and devices drift apart",
    )
    clip: float = Field(
        default=0.3,
        ge=0,
        le=10**9,
        description="largest coordinate of a device's estimate: less tames noise and shortens steps; 0 = off",
    )


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    values: Vector
    stats: Vector
    ema: Vector | None
    buffers: list[Vector]
    """The optimiser's vectors, a row each: the server's, or every device's."""
    done: int = 0
    """Rounds so far."""


class Part(NamedTuple):
    """What one device comes back with."""

    vector: Vector
    """Its estimate, or the values that it came to."""
    loss: float
    images: int
    """That it has probed."""
    buffers: list[Vector]


def init(task: Task) -> State:
    """Refuse what its authors have not; w <- w0."""
    data, t = task.config.data, task.config.train
    if data.per_round != data.devices:
        raise ConfigError(
            f"baffle-original asks all devices in every round: data.per_round {data.per_round} of data.devices "
            f"{data.devices}; set them equal, or use method baffle"
        )
    if task.program.n_stats:
        raise ConfigError("baffle-original's devices send no statistics of a BatchNorm; choose model.norm group")
    rows = data.devices if _level(task) == "epoch" else 1
    buffers = [np.zeros((rows, len(task.values)), np.float32) for _ in range(optimiser_of(task.config).n_buffers)]
    return State(task.program, task.values, task.stats, task.values if t.ema else None, buffers)


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One exchange of all devices, after a minibatch or after an epoch."""
    t, everyone, number, n = task.config.train, range(task.config.data.devices), state.done + 1, state.values.nbytes
    optimiser = optimiser_of(task.config)
    if _level(task) == "batch":
        # An epoch ends with the first device that has no minibatch left.
        in_epoch = -(-int(devices.sizes().min()) // t.batch)
        past, at = divmod(state.done, in_epoch)
        parts = list(devices.probe(state.program, everyone, lambda prober: exchange(task, state, prober, past, at)))
        gradient = aggregate((1, part.vector) for part in parts)
        state.values, moved = step(
            state.values, [rows[0] for rows in state.buffers], gradient, optimiser.step(number)
        )  # fmt: skip
        state.buffers = [rows[None] for rows in moved]
        epoch_over = at == in_epoch - 1
        up = 4 * (t.k + 1)  # the differences, and the loss
    else:
        past, epoch_over = state.done, True
        parts = list(devices.probe(state.program, everyone, lambda prober: epoch(task, state, prober)))
        state.values = finite(aggregate((1, part.vector) for part in parts))
        for device, part in zip(everyone, parts, strict=True):
            for rows, row in zip(state.buffers, part.buffers, strict=True):
                rows[device] = row
        up = n + 4  # the values, and the loss
    if epoch_over:
        state.ema = moving_average(state.ema, state.values, min(t.ema, (2 + past) / (11 + past)))
    state.done = number
    images = sum(part.images for part in parts)
    passes = images * (2 * t.k if t.difference == "central" else t.k + 1)
    return RoundResult(
        round=number,
        lr=optimiser.lr_at(number),
        train_loss=fsum(part.images * part.loss for part in parts) / images,
        participants=list(everyone),
        samples=images,
        work=forward_work(state.program, passes),
        traffic=Traffic(len(parts) * up, len(parts) * n),
    )


def exchange(task: Task, state: State, prober: Prober, past: int, at: int) -> Part:
    """Batch level: the estimate of the minibatch `at` of an epoch."""
    rows = _shuffled(task.config, prober, past)[at]
    gradient, loss = estimate(task.config, prober, state.values, rows, state.done + 1)
    return Part(gradient, loss, len(rows), [])


def epoch(task: Task, state: State, prober: Prober) -> Part:
    """Epoch level: a step of the device's own optimiser for each minibatch."""
    number, values = state.done + 1, state.values.copy()
    buffers = [rows[prober.device].copy() for rows in state.buffers]
    optimiser = optimiser_of(task.config)
    # The rate decays by rounds, a bias correction follows the device's own steps.
    own = replace(optimiser.constant, lr=optimiser.lr_at(number))
    batches, losses = _shuffled(task.config, prober, state.done), []
    for i, rows in enumerate(batches):
        gradient, loss = estimate(task.config, prober, values, rows, number, i)
        apply_step(values, buffers, gradient, own.step(state.done * len(batches) + i + 1))
        losses.append(len(rows) * loss)
    return Part(values, fsum(losses) / prober.samples, prober.samples, buffers)


def estimate(
    config: Config, prober: Prober, values: Vector, rows: Rows, round: int, i: int = 0
) -> tuple[Vector, float]:
    """The gradient of a minibatch by K directions, clipped; and its loss. `i` counts the estimates of a round."""
    t, clip = config.train, config.own(Settings).clip
    directions = Directions(config.seed, round, prober.device, t.k, i * t.k, kind=t.direction, sigma=t.sigma)
    slopes, loss = prober.slopes(values, rows, directions, t.difference == "central")
    gradient = np.zeros_like(values)
    accumulate(gradient, directions, (slopes / t.k).astype(np.float32))
    largest = float(np.abs(gradient).max())
    if clip and largest > clip:
        gradient *= np.float32(clip / largest)
    return gradient, loss


def _shuffled(config: Config, prober: Prober, past: int) -> list[Rows]:
    """A device's minibatches in an epoch, after so many past ones."""
    draws = Draws(config.seed, "minibatches", past, prober.device)
    return [rows for _, rows, _ in minibatches(prober.samples, 1, config.train.batch, draws)]


def _level(task: Task) -> str:
    return task.config.own(Settings).level


def device_memory(task: Task, state: State) -> DeviceMemory:
    """A device that goes forward only; at epoch level with its own optimiser's vectors, a gradient, and a copy."""
    held, what = 0, ""
    if _level(task) == "epoch":
        held, what = (2 + len(state.buffers)) * state.values.nbytes, "its own values, gradient and optimiser's vectors"
    return bp_free_memory(state.program, state.values, task.test, 1, held, what)


enter(
    Method(
        "baffle-original", "dense, forward passes of minibatches", init, round, device_memory, settings=Settings,
        only_simulated="no order asks for a minibatch, or for steps of Adam",
    )
)  # fmt: skip

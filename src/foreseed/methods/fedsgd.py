"""FedSGD (McMahan et al.): devices send the exact gradient of all their images; the server takes the step.

What NTK-BAFFLE estimates, without its noise: the ceiling of any number of directions and bits, with the same server
(optimiser, memory, rate). Devices backpropagate, and send as many numbers as there are live weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import numpy as np

from foreseed.config import Method, enter
from foreseed.coordinator.sampling import sample
from foreseed.engine import Program
from foreseed.meter import DeviceMemory, Work, bp_memory, bp_work
from foreseed.methods.averaging import moving_average
from foreseed.methods.descent import Descent, norm, optimiser_of, restarted, step
from foreseed.methods.fedavg import aggregate
from foreseed.methods.protocol import Devices, Job, RoundResult, Traffic, Vector
from foreseed.methods.task import Task


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    values: Vector
    stats: Vector
    buffers: list[Vector]
    ema: Vector | None
    descent: Descent
    done: int = 0
    """Rounds so far."""


def init(task: Task) -> State:
    """Before the first round."""
    buffers = [np.zeros_like(task.values) for _ in range(optimiser_of(task.config).n_buffers)]
    ema = task.values if task.config.train.ema else None
    return State(task.program, task.values, task.stats, buffers, ema, Descent.of(task))


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round: sample, a gradient of each device, one step."""
    config, number = task.config, state.done + 1
    chosen = sample(config.seed, number, np.arange(config.data.devices), config.data.per_round)
    found = list(devices.gradients(Job(number, chosen, state.program, state.values, state.stats, lr=0.0)))
    samples = [result.samples for result in found]
    weights = np.array([count / sum(samples) for count in samples])
    parts = np.stack([weight * result.values for weight, result in zip(weights, found, strict=True)])
    gradient, _ = state.descent.combine(
        number, chosen, np.array(samples, np.float64), parts[:, None].astype(np.float32)
    )
    if config.train.clip and (length := norm(gradient)) > config.train.clip:
        gradient *= np.float32(config.train.clip / length)
    optimiser = optimiser_of(config)
    restart = restarted(optimiser, gradient, state.buffers)
    state.values, state.buffers = step(
        state.values, state.buffers, gradient, optimiser.step(number, restart=restart), optimiser.nesterov
    )
    state.stats = aggregate((result.samples, result.stats) for result in found)
    state.ema = moving_average(state.ema, state.values, config.train.ema)
    state.done = number
    moved = 4 * (state.program.n_live + state.program.n_stats) * len(found)
    return RoundResult(
        round=number,
        lr=optimiser.lr_at(number),
        train_loss=fsum(result.samples * result.loss for result in found) / sum(samples),
        participants=chosen,
        samples=sum(samples),
        work=sum((bp_work(state.program, count, 1) for count in samples), Work()),
        traffic=Traffic(moved, moved),
        remembered=state.descent.remembered,
    )


def device_memory(task: Task, state: State) -> DeviceMemory:
    """Parameters, gradients and saved activations of dense tensors; gradients add up over batches, so one is enough."""
    return bp_memory(state.program, task.config.train.batch, False)


enter(Method("fedsgd", "dense, backpropagation, the exact gradient", init, round, device_memory, backpropagates=True))
enter(
    Method(
        "ntk-fedsgd", "pruned, backpropagation, the exact gradient", init, round, device_memory, prunes=True,
        backpropagates=True,
    )
)  # fmt: skip

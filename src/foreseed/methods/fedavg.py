"""FedAvg (McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data; Algorithm 1).

    Server:  initialise w
             for each round t: S_t <- a random set of m devices
                               for each device k of S_t in parallel: w_k <- ClientUpdate(k, w)
                               w <- sum over k of (n_k / n) w_k
    ClientUpdate(k, w):  E epochs of minibatch SGD over the device's own n_k images

n counts the images of the devices in S_t. A device's SGD has momentum, which starts anew each round. Running
statistics of batch norms are averaged as the weights are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np

from foreseed.config import Config, Method, enter
from foreseed.coordinator.sampling import sample
from foreseed.engine import Program
from foreseed.engine.errors import ForeseedError, ValuesError
from foreseed.meter import DeviceMemory, Work, bp_memory, bp_work
from foreseed.methods.averaging import moving_average
from foreseed.methods.backprop import Trained
from foreseed.methods.descent import optimiser_of
from foreseed.methods.protocol import Devices, Job, Local, RoundResult, Traffic, Vector
from foreseed.methods.task import Task


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    values: Vector
    stats: Vector
    ema: Vector | None
    done: int = 0
    """Rounds so far."""


def init(task: Task) -> State:
    """Initialise w."""
    return State(task.program, task.values, task.stats, task.values if task.config.train.ema else None)


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round: sample, ClientUpdate on each device, average."""
    number, t = state.done + 1, task.config.train
    lr, chosen = begin(task.config, number)
    trained = list(devices.train(Job(number, chosen, state.program, state.values, state.stats, lr)))
    state.values = aggregate((result.samples, result.values) for result in trained)
    state.stats = aggregate((result.samples, result.stats) for result in trained)
    state.ema = moving_average(state.ema, state.values, t.ema)
    state.done = number
    samples = sum(result.samples for result in trained)
    # Live values and statistics, down and up; a device knows the program, so nothing else needs to be sent.
    moved = 4 * (state.program.n_live + state.program.n_stats) * len(trained)
    return RoundResult(
        round=number,
        lr=lr,
        # fsum: the built-in sum of floats rounds differently from one Python version to the next.
        train_loss=fsum(result.samples * result.loss for result in trained) / samples,
        participants=chosen,
        samples=samples,
        work=sum((bp_work(state.program, result.samples, t.epochs) for result in trained), Work()),
        traffic=Traffic(moved, moved),
    )


def begin(config: Config, number: int) -> tuple[float, list[int]]:
    """The learning rate of a round, and its devices S_t."""
    everyone = np.arange(config.data.devices)
    return optimiser_of(config).lr_at(number), sample(config.seed, number, everyone, config.data.per_round)


def client_update(
    config: Config, number: int, lr: float, local: Local, values: Vector, stats: Vector, **masks: Any
) -> Trained:
    """ClientUpdate(k, w), as [train] says; `masks` is what `LocalTrainer.train` takes for masks that move."""
    t = config.train
    return local.trainer.train(
        values, local.images, local.labels, epochs=t.epochs, batch=t.batch, lr=lr, momentum=t.momentum,
        weight_decay=t.weight_decay, seed=(config.seed, number, local.device), stats=stats, **masks,
    )  # fmt: skip


def aggregate(locals: Iterable[tuple[int, Vector]]) -> Vector:
    """The mean of the devices' values, weighted by their numbers of samples.

    Summed in float64 in the order given, one vector at a time, and rounded once at the end: the same bits whoever
    trained which device, and no more memory for more devices.
    """
    total, weighted = 0, np.zeros(0)
    for n, values in locals:
        if n < 1 or (total and values.shape != weighted.shape):
            raise ValuesError(
                f"{n} samples with {values.size} values beside {weighted.size}: expected a sample or more from each "
                "device, and values of one program"
            )
        weighted = n * values.astype(np.float64) + (weighted if total else 0)
        total += n
    if not total:
        raise ForeseedError("no device has trained, there is nothing to average; ask at least one device a round")
    return (weighted / total).astype(np.float32)


def device_memory(task: Task, state: State) -> DeviceMemory:
    """Parameters, gradients, optimiser state and saved activations of dense tensors."""
    return bp_memory(state.program, task.config.train.batch, task.config.train.momentum > 0)


enter(Method("fedavg", "dense, backpropagation", init, round, device_memory, backpropagates=True))

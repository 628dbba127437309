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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreseed.engine.errors import ForeseedError, ValuesError
from foreseed.meter import Work, bp_work
from foreseed.methods.backprop import Trained, Vector
from foreseed.server.sampling import sample

if TYPE_CHECKING:
    from foreseed.simulate.fleet import Fleet
    from foreseed.simulate.world import World


@dataclass
class State:
    """What goes from round to round."""

    values: Vector
    stats: Vector
    ema: Vector | None
    """The moving average of the values, for evaluation only."""
    done: int = 0
    """Rounds so far."""


def init(world: World) -> State:
    """Initialise w."""
    return State(world.values, world.stats, world.values if world.config.train.ema else None)


def round(world: World, fleet: Fleet, state: State) -> dict[str, Any]:
    """One round; returns what it cost."""
    number, t = state.done + 1, world.config.train
    lr = t.lr * t.lr_decay ** (number - 1)

    def client_update(device: int) -> Trained:
        images, labels = world.images(device)
        return fleet.trainer.train(
            state.values, images, labels, epochs=t.epochs, batch=t.batch, lr=lr, momentum=t.momentum,
            weight_decay=t.weight_decay, seed=(world.config.seed, number, device), stats=state.stats,
        )  # fmt: skip

    everyone = np.arange(world.config.data.devices)
    devices = sample(world.config.seed, number, everyone, world.config.data.per_round)
    sizes = [int(world.partition.sizes[device]) for device in devices]
    trained = list(fleet.map(client_update, devices))
    state.values = aggregate((n, result.values) for n, result in zip(sizes, trained, strict=True))
    state.stats = aggregate((n, result.stats) for n, result in zip(sizes, trained, strict=True))
    state.done = number
    if state.ema is not None:
        decay = np.float32(t.ema)
        state.ema = decay * state.ema + (1 - decay) * state.values
    loss = fsum(n * result.loss for n, result in zip(sizes, trained, strict=True)) / sum(sizes)
    return {"round": number, "lr": lr, "train_loss": loss} | _cost(world, sizes)


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


def arrays(state: State) -> dict[str, npt.ArrayLike]:
    """The state as named arrays, for a checkpoint."""
    saved: dict[str, npt.ArrayLike] = {"round": state.done, "values": state.values, "stats": state.stats}
    return saved if state.ema is None else saved | {"ema": state.ema}


def restore(world: World, saved: dict[str, Any]) -> State:
    """The state of a checkpoint."""
    return State(saved["values"], saved["stats"], saved.get("ema"), int(saved["round"]))


def work(world: World, samples: int) -> Work:
    """What one device-round over `samples` images costs."""
    return bp_work(world.program, samples, world.config.train.epochs)


def _cost(world: World, sizes: list[int]) -> dict[str, Any]:
    cost = sum((work(world, n) for n in sizes), Work())
    # Live values and statistics, down and up; a device knows the program, so nothing else needs to be sent.
    moved = 4 * (world.program.n_live + world.program.n_stats) * len(sizes)
    return {
        "devices": len(sizes), "samples": sum(sizes), "forward_passes": cost.forward_passes, "flops": cost.flops,
        "dense_flops": cost.dense_flops, "bytes_up": moved, "bytes_down": moved,
    }  # fmt: skip

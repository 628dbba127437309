"""LotteryFL (Li et al., LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery Tickets).

    Server:  initialise w0; every device's mask m_k keeps all weights
             for each round: S_t <- a random set of devices; each receives m_k * w     `round`
                             w <- of each weight the mean over the devices that hold it;
                                  a weight that no device holds stays as it is         `moving_mask.masked_mean`
    Device k: a <- accuracy of m_k * w on its own held-out images                      `client_update`
              if a > threshold and m_k keeps more than the target:
                  m_k drops a share of each layer's smallest weights                   `smaller_mask`
                  w_k <- m_k * w0                                                      rewind
              else w_k <- m_k * w
              E epochs of minibatch SGD on w_k under m_k

A device's personal model is what it trained, under its mask; the global model is dense.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor, fsum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from foreseed.config import ConfigError, Method, Table, enter
from foreseed.draws import Draws
from foreseed.engine import Program
from foreseed.meter import DeviceMemory, Work, bp_memory
from foreseed.methods import fedavg
from foreseed.methods.averaging import moving_average
from foreseed.methods.fedavg import aggregate, begin
from foreseed.methods.moving_mask import Layout, Live, layers_kept, masked_mean
from foreseed.methods.protocol import UNSAVED, Devices, Local, RoundResult, Traffic, Vector
from foreseed.methods.task import Task

Bits = npt.NDArray[np.uint8]


class Settings(Table):
    """The keys of [lotteryfl]."""

    threshold: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="accuracy of a device's masked model above which it prunes: higher prunes later, with more known",
    )
    share: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="of each layer's weights that a device drops at a time: more is sparse sooner, and chosen worse",
    )
    held_out: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="of a device's images, one at least, that it tests itself on: more steady the test, fewer train",
    )


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    """Dense: of the global model."""
    values: Vector
    stats: Vector
    ema: Vector | None
    masks: Bits
    """Every device's mask, a row each, a bit for each weight that may be pruned."""
    layout: Layout = field(metadata=UNSAVED)
    done: int = 0
    """Rounds so far."""


class Ticket(NamedTuple):
    """What one device comes back with."""

    values: Vector
    live: Live
    stats: Vector
    loss: float
    samples: int
    accuracy: float
    """Of its personal model, on its held-out images."""
    work: Work
    bytes_up: int
    bytes_down: int


def init(task: Task) -> State:
    """Initialise w0, and masks that keep everything."""
    layout, target = Layout(task.program), task.config.prune.density
    for layer in layout.layers:
        if not weights_of(target, layer.size):
            raise ConfigError(
                f"prune.density {target} leaves no weight of {layer.name}, which has {layer.size}; raise prune.density"
            )
    masks = np.full((task.config.data.devices, layout.mask_bytes), 255, np.uint8)
    return State(task.program, task.values, task.stats, task.values if task.config.train.ema else None, masks, layout)


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round: sample, ClientUpdate on each device, average where masks overlap."""
    number, t, layout = state.done + 1, task.config.train, state.layout
    lr, chosen = begin(task.config, number)
    tickets = list(devices.visit(state.program, chosen, lambda local: client_update(task, state, local, lr)))
    for device, ticket in zip(chosen, tickets, strict=True):
        state.masks[device] = packed(layout, ticket.live)
    state.values = masked_mean(((1.0, ticket.values, ticket.live) for ticket in tickets), state.values)
    state.stats = aggregate((1, ticket.stats) for ticket in tickets)
    state.ema = moving_average(state.ema, state.values, t.ema)
    state.done = number
    samples = sum(ticket.samples for ticket in tickets)
    return RoundResult(
        round=number,
        lr=lr,
        train_loss=fsum(ticket.samples * ticket.loss for ticket in tickets) / samples,
        participants=chosen,
        samples=samples,
        work=sum((ticket.work for ticket in tickets), Work()),
        traffic=Traffic(sum(ticket.bytes_up for ticket in tickets), sum(ticket.bytes_down for ticket in tickets)),
        personal_accuracy=fsum(ticket.accuracy for ticket in tickets) / len(tickets),
        personal_density=fsum(layout.density(ticket.live) for ticket in tickets) / len(tickets),
    )


def client_update(task: Task, state: State, local: Local, lr: float) -> Ticket:
    """Test, prune and rewind if the test went well, train, test again."""
    t, own, layout = task.config.train, task.config.own(Settings), state.layout
    tested, learnt = held_out(len(local.labels), own.held_out, Draws(task.config.seed, "held out", local.device))
    received = unpacked(layout, state.masks[local.device])
    live, values, stats = received, state.values, state.stats

    def accuracy(values: Vector, live: Live, stats: Vector) -> float:
        masked = np.where(live, values, np.float32(0))
        return local.trainer.test(masked, local.images[tested], local.labels[tested], stats if stats.size else None)[1]

    if not is_done(layout, live, task.config.prune.density) and accuracy(values, live, stats) > own.threshold:
        live = smaller_mask(layout, values, live, own.share, task.config.prune.density)
        values, stats = task.values, task.stats
    own_part = local._replace(images=local.images[learnt], labels=local.labels[learnt])
    trained = fedavg.client_update(task.config, state.done + 1, lr, own_part, values, stats, live=live)
    pruned = not np.array_equal(live, received)
    return Ticket(
        trained.values, live, trained.stats, trained.loss, len(learnt), accuracy(trained.values, live, trained.stats),
        # The test before and the one after, and three passes an image and epoch.
        layout.work(received, len(tested)) + layout.work(live, len(tested) + 3 * t.epochs * len(learnt)),
        # Down: the values of the mask that the server knows. Up: those of the mask as it is now, which goes along if
        # it is another one. w0 came with the program.
        layout.value_bytes(live) + (layout.mask_bytes if pruned else 0),
        layout.value_bytes(received),
    )  # fmt: skip


def smaller_mask(layout: Layout, values: Vector, live: Live, share: float, target: float) -> Live:
    """Drop a share of each layer's live weights, the smallest ones, but leave it the target's share of all."""
    counts = []
    for layer in layout.layers:
        alive = int(live[layer.at].sum())
        # As many as lie below the percentile of their sizes, which is between two of them.
        kept = alive - ceil(share * (alive - 1) - 1e-9)
        counts.append(min(alive, max(kept, weights_of(target, layer.size))))
    return layers_kept(layout, np.where(live, np.abs(values), np.float32(-1)), counts)


def is_done(layout: Layout, live: Live, target: float) -> bool:
    """Whether every layer is down to what it keeps at the target: then nothing is dropped, and nothing rewound."""
    return all(int(live[layer.at].sum()) <= weights_of(target, layer.size) for layer in layout.layers)


def weights_of(target: float, size: int) -> int:
    """The weights that a layer keeps at the target, rounded down: a mask that holds no more than these is done."""
    return floor(target * size + 1e-9)


def held_out(n: int, share: float, draws: Draws) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The numbers of the images that a device tests itself on, and of those that it learns; a single one is both."""
    order = draws.permutation(n)
    tests = max(1, int(share * n))
    return order[:tests], order[tests:] if n > 1 else order


def packed(layout: Layout, live: Live) -> Bits:
    """A mask as bits: of the weights that may be pruned alone."""
    return np.packbits(np.concatenate([live[layer.at] for layer in layout.layers]))


def unpacked(layout: Layout, bits: Bits) -> Live:
    """The mask of some bits."""
    live, at = layout.everything.copy(), 0
    weights = np.unpackbits(bits, count=layout.n_weights).astype(bool)
    for layer in layout.layers:
        live[layer.at] = weights[at : at + layer.size]
        at += layer.size
    return live


def device_memory(task: Task, state: State) -> DeviceMemory:
    """Backpropagation through dense tensors, with the initial values to rewind to and a mask of its own."""
    held = 4 * state.layout.n + state.layout.mask_bytes
    t = task.config.train
    return bp_memory(state.program, t.batch, t.momentum > 0, held, "the initial values and its own mask")


enter(
    Method(
        "lotteryfl", "personal masks of lottery tickets, backpropagation", init, round, device_memory,
        backpropagates=True, settings=Settings,
    )
)  # fmt: skip

"""NTK-BAFFLE: foresight pruning, then training by forward passes alone (the paper's Algorithm 1).

Foresight pruning, on the server (lines 1-17)      `foreseed.prune.foresight`, when the task is made
    T_p times: score every surviving weight by the NTK saliency (Eqs. 13-15), keep the best d^(t/T_p) of all
BP-free training (lines 1-12 of its second half)   this file
    1   W <- W0 * m                                `init`
    2   for each round t:                          `round`
    3-4     C_t <- RandomSample(C, G_t)            `Coordinator.open`, by whoever knows who is there
    5-9     device i: dL_ik = L(W + d_ik; D_i) - L(W; D_i) along K directions of its seed; send K numbers
                                                   `Devices.ask`; on a device: `foreseed.device.probing.answer`
    10      make the same directions from seeds    `rebuilt_gradient`
    11      aggregate by Eq. 16                    `stein_coefficients`
    12      W <- W - eta g, with momentum          `step`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt
from typing import NamedTuple, TypeAlias

import numpy as np

from foreseed.config import Config, Method, enter, fingerprint
from foreseed.coordinator import Coordinator, Optimiser, Rules, answers
from foreseed.coordinator.coordinator import State as ServerState
from foreseed.coordinator.robust import added, clipped, fair, trimmed_mean
from foreseed.engine import SHARED_DEVICE, ForeseedError, Program
from foreseed.engine.update import apply_step, estimate
from foreseed.meter import DeviceMemory, Work, bp_free_memory, forward_work
from foreseed.methods.averaging import moving_average
from foreseed.methods.protocol import UNSAVED, Devices, RoundResult, Vector
from foreseed.methods.task import Task
from foreseed.wire import Reply, Update

Map: TypeAlias = Callable[[Callable[[tuple[int, int]], None], Iterable[tuple[int, int]]], Iterable[None]]


class NotFiniteError(ForeseedError):
    """The update would make values that are not finite; the state before it is kept."""


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    server: ServerState
    ema: Vector | None
    coordinator: Coordinator = field(metadata=UNSAVED)
    """Works on `server`."""

    @property
    def values(self) -> Vector:
        return self.server.values

    @property
    def stats(self) -> Vector:
        return self.server.stats


class Learnt(NamedTuple):
    """What a round's replies came to."""

    update: Update
    """For the log: all that a device needs to follow."""
    lr: float
    base_loss: float
    """Mean loss of the devices that answered, weighted by their samples."""
    samples: int
    replies: tuple[Reply, ...]


def init(task: Task) -> State:
    """Line 1: W <- W0 * m."""
    coordinator = Coordinator.start(_rules(task.config), _optimiser(task.config), task.values, task.stats)
    ema = task.values.copy() if task.config.train.ema else None
    return State(task.program, coordinator.state, ema, coordinator)


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """Lines 2-12: one round of training."""
    traffic = devices.ask(state.coordinator, state.program)
    learnt = learn(state.coordinator, devices.map)
    state.ema = moving_average(state.ema, state.values, task.config.train.ema)
    return RoundResult(
        round=learnt.update.round,
        lr=learnt.lr,
        train_loss=learnt.base_loss,
        participants=[reply.device for reply in learnt.replies],
        samples=learnt.samples,
        work=sum((forward_work(state.program, reply.forward_passes) for reply in learnt.replies), Work()),
        traffic=traffic,
    )


def learn(coordinator: Coordinator, spread_over: Map = map) -> Learnt:
    """Lines 10-12: from the open round's replies to the next round's values.

    `spread_over` maps a function over ranges of coordinates; a thread pool's `map` makes it parallel, with the same
    bits, since coordinates are independent.
    """
    rules, server, replies = coordinator.rules, coordinator.state, coordinator.replies
    coefficients = stein_coefficients(rules, replies)
    update = Update(coordinator.round, coordinator.optimiser.step(coordinator.round), coefficients)
    gradient = rebuilt_gradient(rules, update, len(server.values), spread_over)
    if rules.clip:
        update, gradient = _with_norm_at_most(rules, update, gradient, spread_over)
    values, buffers = step(server.values, server.buffers, gradient, update.step)
    coordinator.close(update, values, buffers)
    samples = sum(reply.samples for reply in replies)
    # fsum: the built-in sum of floats rounds differently from one Python version to the next.
    loss = fsum(reply.samples * reply.base_loss for reply in replies) / samples
    return Learnt(update, coordinator.optimiser.lr_at(update.round), loss, samples, replies)


def stein_coefficients(rules: Rules, replies: Sequence[Reply]) -> tuple[tuple[int, bytes], ...]:
    """Eq. 16: g = sum over i and k of (N_i / N) dL_ik / (K sigma) z_ik; these are the factors of the directions z_ik.

    N counts the images of the devices that answered. Shared directions have one factor each, of device SHARED_DEVICE.
    """
    if not replies:
        raise ForeseedError("the round has no replies to learn from; wait, or ask other devices")
    total = sum(reply.samples for reply in replies)
    weights = np.array([reply.samples / total for reply in replies])
    differences = np.stack([answers.differences(reply, rules) for reply in replies])
    if rules.robust == "clip":
        differences, weights = clipped(differences), fair(weights)
    scale = 1.0 / (rules.k * rules.sigma)
    if rules.robust == "trim":
        factors = [(SHARED_DEVICE, scale * trimmed_mean(differences, weights, rules.trim))]
    else:
        shares = [weight * scale * row for weight, row in zip(weights, differences, strict=True)]
        factors = [(reply.device, share) for reply, share in zip(replies, shares, strict=True)]
        if rules.seeds == "shared":
            factors = [(SHARED_DEVICE, added(shares))]
    with np.errstate(over="ignore"):  # infinite in float32: `step` refuses what comes of it
        return tuple((device, factor.astype("<f4").tobytes()) for device, factor in factors)


def rebuilt_gradient(rules: Rules, update: Update, n: int, spread_over: Map) -> Vector:
    """Line 10: the directions again, from their seeds, each times its factor; summed in an order that is fixed."""
    gradient = np.zeros(n, np.float32)

    def piece(span: tuple[int, int]) -> None:
        estimate(gradient[span[0] : span[1]], update, rules.seed, rules.kind, span[0])

    # A multiple of 512 coordinates: whole blocks of the generator.
    size = max(512, -(-n // 16) // 512 * 512)
    list(spread_over(piece, [(at, min(at + size, n)) for at in range(0, n, size)]))
    return gradient


def step(values: Vector, buffers: Sequence[Vector], gradient: Vector, constants: bytes) -> tuple[Vector, list[Vector]]:
    """Line 12: a step of the server's optimiser; new values, and the optimiser's new vectors."""
    moved, kept = values.copy(), [buffer.copy() for buffer in buffers]
    apply_step(moved, kept, gradient, constants)
    if not all(np.isfinite(vector).all() for vector in (moved, *kept)):
        raise NotFiniteError(
            "the update makes values that are not finite; lower train.lr, or set train.clip, and start anew"
        )
    return moved, kept


def _with_norm_at_most(rules: Rules, update: Update, gradient: Vector, spread_over: Map) -> tuple[Update, Vector]:
    # np.sum would add in an order of its own choice, and the log's coefficients follow from the norm; fsum takes
    # 4 ms for 60,000 numbers.
    norm = sqrt(fsum((gradient.astype(np.float64) ** 2).tolist()))
    if not rules.clip < norm < np.inf:
        return update, gradient
    factor = np.float64(rules.clip / norm)
    # The log must hold what was really applied, so the coefficients shrink, and the estimate is made again.
    parts = tuple((device, (np.frombuffer(c, "<f4") * factor).astype("<f4").tobytes()) for device, c in update.parts)
    shorter = Update(update.round, update.step, parts)
    return shorter, rebuilt_gradient(rules, shorter, len(gradient), spread_over)


def run_id(config: Config) -> bytes:
    """The run's name in messages: from the config, so that a resumed run is the same run."""
    return bytes.fromhex(fingerprint(config))[:8]


def device_memory(task: Task, state: State) -> DeviceMemory:
    """One image at a time is enough, but for the statistics of a batch norm's batch."""
    batch = task.config.train.batch if state.program.n_stats else 1
    return bp_free_memory(state.program, state.values, task.test, batch)


def _rules(config: Config) -> Rules:
    t = config.train
    return Rules(
        run_id(config), config.seed, config.data.devices, config.data.per_round, t.k, t.sigma, t.direction, t.seeds,
        t.spread, t.difference == "central", t.local_steps, t.local_lr, t.clip, t.robust, t.trim,
        config.fleet.replay_numbers, bits=t.bits,
    )  # fmt: skip


def _optimiser(config: Config) -> Optimiser:
    t = config.train
    return Optimiser(t.optimiser, t.lr, t.momentum, t.weight_decay, t.lr_decay)


enter(Method("ntk-baffle", "pruned, forward passes only", init, round, device_memory, prunes=True))

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
    12      W <- W - eta g, with momentum          `foreseed.methods.descent.step`
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from typing import NamedTuple, TypeAlias

import numpy as np

from foreseed.config import Config, Method, enter, fingerprint
from foreseed.coordinator import Coordinator, Rules, answers
from foreseed.coordinator.coordinator import State as ServerState
from foreseed.coordinator.robust import contained, limited, trimmed_mean
from foreseed.coordinator.sums import Doubles, added
from foreseed.engine import SHARED_DEVICE, Directions, ForeseedError, Program, rebuild
from foreseed.engine.blocks import spans, starts
from foreseed.meter import DeviceMemory, Work, bp_free_memory, bp_free_work, forward_work
from foreseed.methods.averaging import moving_average
from foreseed.methods.descent import Descent, norm, optimiser_of, restarted, step
from foreseed.methods.layout import layout
from foreseed.methods.noise import Noise
from foreseed.methods.protocol import UNSAVED, Devices, RoundResult, Vector
from foreseed.methods.task import Task
from foreseed.wire import Reply, Update

Piece: TypeAlias = Callable[[], None]
Map: TypeAlias = Callable[[Callable[[Piece], None], Iterable[Piece]], Iterable[None]]


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    server: ServerState
    ema: Vector | None
    descent: Descent
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
    """Mean loss of the devices that answered, weighted by the samples that count."""
    samples: int
    replies: tuple[Reply, ...]
    snr: float | None
    """Signal-to-noise ratio of the round's estimate; None where nothing tells."""
    left_out: tuple[int, ...]
    """Devices that answered and do not count (see `agreement.py`)."""


def init(task: Task) -> State:
    """Line 1: W <- W0 * m."""
    rules = _rules(task.config, task.program)
    coordinator = Coordinator.start(rules, optimiser_of(task.config), task.values, task.stats)
    ema = task.values.copy() if task.config.train.ema else None
    return State(task.program, coordinator.state, ema, Descent.of(task), coordinator)


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """Lines 2-12: one round of training."""
    traffic = devices.ask(state.coordinator, state.program)
    learnt = learn(state.coordinator, devices.map, state.descent)
    state.ema = moving_average(state.ema, state.values, task.config.train.ema)
    return RoundResult(
        round=learnt.update.round,
        lr=learnt.lr,
        train_loss=learnt.base_loss,
        participants=[reply.device for reply in learnt.replies],
        samples=learnt.samples,
        work=sum((_work(state, reply) for reply in learnt.replies), Work()),
        traffic=traffic,
        snr=learnt.snr,
        remembered=state.descent.remembered,
        left_out=learnt.left_out,
    )


def _work(state: State, reply: Reply) -> Work:
    """What a device computed for its reply: its probes, and a pass for the statistics of batch norms."""
    rules, samples = state.coordinator.rules, reply.samples
    probes = bp_free_work(state.program, samples, rules.probed, rules.central, rules.local_steps)
    return probes + forward_work(state.program, samples if state.program.n_stats else 0)


def learn(coordinator: Coordinator, spread_over: Map = map, descent: Descent | None = None) -> Learnt:
    """Lines 10-12: from the open round's replies to the next round's values.

    `spread_over` maps a function over pieces of work on ranges of coordinates; a thread pool's `map` makes it parallel,
    with the same bits, since coordinates are independent.
    """
    rules, server, answered = coordinator.rules, coordinator.state, coordinator.replies
    descent = descent or Descent(Noise())

    def estimate(replies: Sequence[Reply]) -> tuple[Doubles, Update, Vector, Vector]:
        counts = sample_counts(rules, replies)
        usual = coordinator.usual.size if coordinator.usual else 0.0
        update = Update(coordinator.round, b"", stein_coefficients(rules, replies, counts, usual))
        return counts, update, *rebuilt_gradient(rules, update, len(server.values), spread_over)

    counts, update, gradient, halves = estimate(answered)
    left_out: list[int] = []
    compared = rules.robust == "clip" and rules.seeds != "shared"
    if compared and descent.agreement is not None and np.isfinite(gradient).all():
        left_out = descent.agreement.opposed([reply.device for reply in answered], halves)
    replies = [reply for reply in answered if reply.device not in left_out]
    if left_out:
        counts, update, gradient, halves = estimate(replies)
    snr = None
    if np.isfinite(gradient).all():
        # Devices that share directions have one part together.
        shared = rules.seeds == "shared"
        devices = [SHARED_DEVICE] if shared else [reply.device for reply in replies]
        mean, snr = descent.combine(update.round, devices, np.ones(1) if shared else counts, halves)
        gradient = mean if rules.memory else gradient
    share = 1.0 if rules.rate == "fixed" else descent.noise.share
    restart = restarted(coordinator.optimiser, gradient, server.buffers)
    update = update._replace(step=coordinator.optimiser.step(update.round, share, restart))
    if rules.clip:
        update, gradient = _with_norm_at_most(coordinator, update, gradient, spread_over)
    if rules.rate == "layers":
        gradient = (descent.noise.shares / share * gradient).astype(np.float32)
    values, buffers = step(server.values, server.buffers, gradient, update.step, coordinator.optimiser.nesterov)
    coordinator.close(update, values, buffers)
    # fsum: the built-in sum of floats rounds differently from one Python version to the next.
    loss = fsum(count * reply.base_loss for count, reply in zip(counts, replies, strict=True)) / fsum(counts)
    lr = share * coordinator.optimiser.lr_at(update.round)
    return Learnt(update, lr, loss, sum(reply.samples for reply in answered), answered, snr, tuple(left_out))


def sample_counts(rules: Rules, replies: Sequence[Reply]) -> Doubles:
    """N_i: how many of their images count, for the devices that answered."""
    if not replies:
        raise ForeseedError("the round has no replies to learn from; wait, or ask other devices")
    return limited([reply.samples for reply in replies], rules)


def stein_coefficients(
    rules: Rules, replies: Sequence[Reply], counts: Doubles, usual: float = 0.0
) -> tuple[tuple[int, bytes], ...]:
    """Eq. 16: g = sum over i and k of w_i dL_ik / (K sigma) z_ik; these are the factors of the directions z_ik.

    A device's weight w_i is its share of the samples `counts`. Shared directions have one factor each, of device
    SHARED_DEVICE. `usual` is the size of differences in the last rounds, 0 if there were none.
    """
    weights, differences = counts / fsum(counts), np.stack([answers.differences(reply, rules) for reply in replies])
    if rules.robust == "clip":
        differences = contained(differences, weights, usual)
    # K is that of the block that a direction belongs to.
    counts_of_blocks = [rules.local_steps * block.k for block in rules.probed]
    scale = np.repeat([1.0 / (block.k * rules.sigma) for block in rules.probed], counts_of_blocks)
    if rules.robust == "trim":
        factors = [(SHARED_DEVICE, scale * trimmed_mean(differences, weights, rules.trim))]
    else:
        shares = [weight * scale * row for weight, row in zip(weights, differences, strict=True)]
        factors = [(reply.device, share) for reply, share in zip(replies, shares, strict=True)]
        if rules.seeds == "shared":
            factors = [(SHARED_DEVICE, added(shares))]
    with np.errstate(over="ignore"):  # infinite in float32: `step` refuses what comes of it
        return tuple((device, factor.astype("<f4").tobytes()) for device, factor in factors)


def rebuilt_gradient(rules: Rules, update: Update, n: int, spread_over: Map) -> tuple[Vector, Vector]:
    """Line 10: the directions again, from their seeds, each times its factor; and every device's part of that sum.

    A part is two halves, [device, half, coordinate], of its first and its last directions: their difference tells how
    noisy they are. Summed in an order that is fixed, since devices that replay must come to the same bits.
    """
    gradient, halves = np.zeros(n, np.float32), np.empty((len(update.parts), 2, n), np.float32)
    # A multiple of 512 coordinates: whole blocks of the generator.
    size = max(2048, -(-n // 16) // 512 * 512)
    pieces: list[Piece] = []
    for span in spans(rules.probed):
        first, count, whole = span.first, rules.local_steps * span.k, span.size or n
        parts = [
            Directions(rules.seed, update.round, device, count, first, kind=rules.kind, at=span.at, size=span.size)
            for device, _ in update.parts
        ]
        coefficients = b"".join(some[4 * first : 4 * (first + count)] for _, some in update.parts)
        pieces += [
            partial(rebuild, gradient, halves, parts, coefficients, start, min(size, whole - start))
            for start in range(0, whole, size)
        ]
    list(spread_over(compute, pieces))
    return gradient, halves


def compute(piece: Piece) -> None:
    """Do a piece of work."""
    piece()


def _with_norm_at_most(
    coordinator: Coordinator, update: Update, gradient: Vector, spread_over: Map
) -> tuple[Update, Vector]:
    rules, length = coordinator.rules, norm(gradient)
    if not rules.clip < length < np.inf:
        return update, gradient
    factor = np.float64(rules.clip / length)
    if not coordinator.devices_replay:
        return update, (factor * gradient).astype(np.float32)
    # The log must hold what was really applied, so the coefficients shrink, and the estimate is made again.
    parts = tuple((device, (np.frombuffer(c, "<f4") * factor).astype("<f4").tobytes()) for device, c in update.parts)
    shorter = update._replace(parts=parts)
    return shorter, rebuilt_gradient(rules, shorter, len(gradient), spread_over)[0]


def run_id(config: Config, times_gone_back: int = 0) -> bytes:
    """The run's name in messages: from the config, so that a resumed run is the same run.

    One that went back to an earlier round is another: what devices hold and have to say is of rounds that no longer
    count.
    """
    name = fingerprint(config) + (f" {times_gone_back}" if times_gone_back else "")
    return (hashlib.sha256(name.encode()).digest() if times_gone_back else bytes.fromhex(name))[:8]


def device_memory(task: Task, state: State) -> DeviceMemory:
    """One image at a time is enough, but for the statistics of a batch norm's batch."""
    batch = task.config.train.batch if state.program.n_stats else 1
    keep = starts(spans(state.coordinator.rules.blocks))
    return bp_free_memory(state.program, state.values, task.test, batch, keep=keep)


def _rules(config: Config, program: Program) -> Rules:
    t = config.train
    return Rules(
        run_id(config), config.seed, config.data.devices, config.data.per_round, t.k, t.sigma, t.direction, t.seeds,
        t.spread, t.difference == "central", t.local_steps, t.local_lr, t.clip, t.robust, t.trim,
        config.fleet.max_share, program.classes, config.fleet.replay_numbers, bits=t.bits,
        rate=t.rate, memory=t.memory, blocks=layout(program, t.blocks, t.k, t.spread),
    )  # fmt: skip


enter(Method("ntk-baffle", "pruned, forward passes only", init, round, device_memory, prunes=True))

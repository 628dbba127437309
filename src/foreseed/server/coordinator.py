"""The coordinator: a state machine that takes messages and returns messages. It does no I/O.

A round: `open` samples devices and writes their orders, `receive` takes replies, `ask_others` replaces devices that do
not answer, `close` aggregates (paper Eq. 16), steps the optimiser and returns the update for the log. The simulator
and a real fleet are thin drivers around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from foreseed.engine import SHARED_DEVICE, ForeseedError
from foreseed.engine.types import DirectionKind
from foreseed.engine.update import apply_step, estimate
from foreseed.server.optimiser import Optimiser
from foreseed.server.robust import added, clipped, fair, trimmed_mean
from foreseed.server.sampling import sample
from foreseed.wire import NOTHING_HELD, OrderMessage, Reply, Update, encode, values_hash
from foreseed.wire.messages import MAX_DIRECTIONS

# The most that an order carries of the log: an order stays small whatever a device missed.
MAX_UPDATES_BYTES = 1 << 16

Vector = npt.NDArray[np.float32]
Map = Callable[[Callable[[tuple[int, int]], None], Iterable[tuple[int, int]]], Iterable[None]]


_CHOICES = {
    "kind": ("gaussian", "rademacher"),
    "seeds": ("per-device", "shared"),
    "robust": ("none", "clip", "trim"),
}


class NotFiniteError(ForeseedError):
    """The update would make values that are not finite; the state before it is kept."""


@dataclass(frozen=True)
class Rules:
    """What every order of a run says."""

    run: bytes
    seed: int
    devices: int
    per_round: int
    k: int
    sigma: float
    kind: DirectionKind = "gaussian"
    seeds: Literal["per-device", "shared"] = "per-device"
    spread: int = 1
    central: bool = False
    local_steps: int = 1
    local_lr: float = 0.01
    clip: float = 0.0
    """Largest L2 norm of the aggregated estimate; 0 = no limit."""
    robust: Literal["none", "clip", "trim"] = "none"
    """What keeps devices that lie, or are broken, from deciding a round (see `robust.py`)."""
    trim: float = 0.1
    """trim: the share of devices left out at either end of every direction."""
    replay_numbers: int = 50_000_000
    """Most random numbers that a device is asked to make to catch up; a small board makes a few million a second."""

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            if (given := getattr(self, key)) not in known:
                raise ForeseedError(f"rules: {key} {given!r} given, expected one of {', '.join(known)}")
        if self.scalars > MAX_DIRECTIONS:
            raise ForeseedError(
                f"train.k {self.k} x train.local_steps {self.local_steps}: {self.scalars} loss differences do not fit "
                f"a reply, which holds {MAX_DIRECTIONS}; lower one of them"
            )
        if self.robust == "trim" and self.seeds != "shared":
            raise ForeseedError(
                'train.robust "trim" compares devices along the same directions; set train.seeds to "shared", or '
                'train.robust to "clip"'
            )

    @property
    def scalars(self) -> int:
        """Loss differences in a reply."""
        return self.k * self.local_steps


@dataclass
class State:
    """All that a coordinator must not lose."""

    round: int
    """Rounds closed so far."""
    values: Vector
    buffers: list[Vector]
    """The optimiser's vectors."""
    stats: Vector
    """Batch-norm statistics, averaged over the devices of the last round."""
    last_seen: npt.NDArray[np.int32]
    """The round whose values each device holds; -1 = none."""
    log_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Encoded size of every update so far, to know what a catch-up would cost."""


@dataclass(frozen=True)
class Closed:
    """What a closed round did."""

    update: Update
    lr: float
    base_loss: float
    """Mean loss of the devices that answered, weighted by their samples."""
    samples: int
    replies: tuple[Reply, ...]


class Coordinator:
    """The server's side of a BP-free run."""

    def __init__(self, rules: Rules, optimiser: Optimiser, state: State, log: Sequence[Update] = ()) -> None:
        self.rules, self.optimiser, self.state = rules, optimiser, state
        self.log = list(log)
        self.refused: Counter[str] = Counter()
        """Replies that changed nothing, by reason."""
        self._asked: set[int] = set()
        self._replies: dict[int, Reply] = {}
        self._hash = b""
        self._directions: dict[int, int] = {}
        """How many directions a round's update holds, once asked for."""

    @staticmethod
    def start(rules: Rules, optimiser: Optimiser, values: npt.ArrayLike, stats: npt.ArrayLike = ()) -> Coordinator:
        """A coordinator before its first round."""
        vector = np.array(values, np.float32)
        buffers = [np.zeros_like(vector) for _ in range(optimiser.n_buffers)]
        seen = np.full(rules.devices, -1, np.int32)
        return Coordinator(rules, optimiser, State(0, vector, buffers, np.array(stats, np.float32), seen))

    @property
    def round(self) -> int:
        """The round that is open, or would be opened next (counted from 1)."""
        return self.state.round + 1

    def open(self, present: Sequence[int] | None = None, extra: int = 0) -> list[OrderMessage]:
        """Sample the devices of the round (without replacement) and write their orders, `extra` more than needed.

        The sample follows from the seed, the round and who is `present` (all, if not given), in whatever order.
        """
        self._asked, self._replies = set(), {}
        self._hash = values_hash(self.state.values)
        pool = np.arange(self.rules.devices) if present is None else present
        return self._ask(pool, self.rules.per_round + extra)

    def ask_others(self, present: Iterable[int]) -> list[OrderMessage]:
        """Orders for devices that were not asked yet, as many as replies are missing; what arrived still counts."""
        return self._ask([device for device in present if device not in self._asked], self.missing)

    @property
    def missing(self) -> int:
        """How many replies the round lacks."""
        return self.rules.per_round - len(self._replies)

    @property
    def replies(self) -> tuple[Reply, ...]:
        """What arrived so far, by device."""
        return tuple(self._replies[device] for device in sorted(self._replies))

    @property
    def waiting(self) -> set[int]:
        """Devices that were asked and have not answered."""
        return self._asked - self._replies.keys()

    def receive(self, reply: Reply) -> str | None:
        """Take a reply; returns None, or why it was refused (it then changed nothing)."""
        reason = self._fault(reply)
        if reason is None:
            self._replies[reply.device] = reply
        else:
            self.refused[reason] += 1
        return reason

    def close(self, spread_over: Map = map) -> Closed:
        """Aggregate the replies, step, and go to the next round.

        `spread_over` maps a function over ranges of coordinates; a thread pool's `map` makes it parallel, with the
        same bits, since coordinates are independent.
        """
        replies = self.replies
        if not replies:
            raise ForeseedError(f"round {self.round} has no replies to close with; wait, or ask other devices")
        total = sum(reply.samples for reply in replies)
        update = self._update(replies, total)
        gradient = self._estimate(update, spread_over)
        if self.rules.clip:
            update, gradient = self._clipped(update, gradient, spread_over)
        values, buffers = self.state.values.copy(), [buffer.copy() for buffer in self.state.buffers]
        apply_step(values, buffers, gradient, update.step)
        if not all(np.isfinite(vector).all() for vector in (values, *buffers)):
            raise NotFiniteError(
                "the update makes values that are not finite; lower train.lr, or set train.clip, and start anew"
            )
        self._advance(update, values, buffers, replies, total)
        # fsum: the built-in sum of floats rounds differently from one Python version to the next.
        loss = fsum(reply.samples * reply.base_loss for reply in replies) / total
        return Closed(update, self.optimiser.lr_at(update.round), loss, total, replies)

    # The catch-up: a device that keeps the optimiser's vectors can replay what it missed.

    @property
    def devices_replay(self) -> bool:
        """Whether devices keep the optimiser's state: where replaying the mean gap costs less than the values."""
        parts = 1 if self.rules.seeds == "shared" else self.rules.per_round
        gap = self.rules.devices / self.rules.per_round
        return gap * parts * 4 * self.rules.scalars < self.state.values.nbytes

    @property
    def vectors(self) -> int:
        """How many of the optimiser's vectors devices keep."""
        return len(self.state.buffers) if self.devices_replay else 0

    def state_bytes(self) -> bytes:
        """Values, and the optimiser's vectors where devices replay."""
        return b"".join(vector.tobytes() for vector in (self.state.values, *self.state.buffers[: self.vectors]))

    def holds(self, device: int, round: int) -> None:
        """Note the round whose values a device says it holds; what cannot be is nothing."""
        self.state.last_seen[device] = round if 0 <= round <= self.state.round else NOTHING_HELD

    def catch_up(self, device: int) -> tuple[Update, ...]:
        """The updates that this device missed, where they are cheaper than the state: none otherwise."""
        seen = int(self.state.last_seen[device])
        behind = self.state.round - seen
        if seen < 0 or not behind or not self.devices_replay or len(self.log) < behind:
            return ()
        missed = tuple(self.log[len(self.log) - behind :])
        state = (1 + self.vectors) * self.state.values.nbytes
        if int(self.state.log_bytes[seen:].sum()) >= min(state, MAX_UPDATES_BYTES):
            return ()
        directions = sum(map(self._directions_of, missed))
        return missed if directions * len(self.state.values) <= self.rules.replay_numbers else ()

    def order_bytes(self, order: OrderMessage) -> int:
        """The size of an order on the wire. The updates in it were measured once, when they were made."""
        count = len(order.updates)
        head = 1 if count < 24 else 2 if count < 256 else 3
        # Inside an order an update goes without its version and type, a byte each.
        updates = int(self.state.log_bytes[len(self.state.log_bytes) - count :].sum()) - 2 * count
        return len(encode(order._replace(updates=()))) - 1 + head + updates

    def order(self, device: int) -> OrderMessage:
        """The open round's order for a device, with what it missed."""
        r = self.rules
        return OrderMessage(
            r.run, self.round, device, r.seed, r.k, r.sigma, r.kind == "rademacher", r.seeds == "shared", r.spread,
            r.central, r.local_steps, r.local_lr, self._hash, self.catch_up(device),
        )  # fmt: skip

    def _directions_of(self, update: Update) -> int:
        if update.round not in self._directions:
            self._directions[update.round] = sum(len(coefficients) // 4 for _, coefficients in update.parts)
        return self._directions[update.round]

    def _ask(self, pool: npt.ArrayLike, count: int) -> list[OrderMessage]:
        asked = sample(self.rules.seed, self.round, pool, count)
        self._asked.update(asked)
        return [self.order(device) for device in asked]

    def _fault(self, reply: Reply) -> str | None:
        if reply.run != self.rules.run:
            return "foreign run"
        if reply.round != self.round:
            return "late" if reply.round < self.round else "early"
        if reply.device not in self._asked:
            return "unasked device"
        if reply.device in self._replies:
            return "duplicate"
        if not self.missing:
            return "not needed any more"
        if len(reply.losses) != 4 * (1 + self.rules.scalars) or len(reply.stats) != self.state.stats.nbytes:
            return "wrong length"
        if not np.isfinite(np.frombuffer(reply.losses + reply.stats, "<f4")).all():
            return "not finite"
        return None

    def _update(self, replies: Sequence[Reply], total: int) -> Update:
        """Coefficients c_ik = (N_i / N) ΔL_ik / (K sigma): Eq. 16 with directions of unit variance."""
        scale = 1.0 / (self.rules.k * self.rules.sigma)
        differences = np.stack([np.frombuffer(reply.losses, "<f4")[1:].astype(np.float64) for reply in replies])
        weights = np.array([reply.samples / total for reply in replies])
        if self.rules.robust == "clip":
            differences, weights = clipped(differences), fair(weights)
        if self.rules.robust == "trim":
            parts = [(SHARED_DEVICE, scale * trimmed_mean(differences, weights, self.rules.trim))]
        else:
            shares = [weight * scale * row for weight, row in zip(weights, differences, strict=True)]
            parts = [(reply.device, share) for reply, share in zip(replies, shares, strict=True)]
            if self.rules.seeds == "shared":
                parts = [(SHARED_DEVICE, added(shares))]
        with np.errstate(over="ignore"):  # infinite in float32: `close` refuses what comes of it
            coded = tuple((device, c.astype("<f4").tobytes()) for device, c in parts)
        return Update(self.round, self.optimiser.step(self.round), coded)

    def _estimate(self, update: Update, spread_over: Map) -> Vector:
        gradient = np.zeros_like(self.state.values)

        def piece(span: tuple[int, int]) -> None:
            estimate(gradient[span[0] : span[1]], update, self.rules.seed, self.rules.kind, span[0])

        # A multiple of 512 coordinates: whole blocks of the generator.
        size = max(512, -(-len(gradient) // 16) // 512 * 512)
        list(spread_over(piece, [(at, min(at + size, len(gradient))) for at in range(0, len(gradient), size)]))
        return gradient

    def _clipped(self, update: Update, gradient: Vector, spread_over: Map) -> tuple[Update, Vector]:
        # np.sum would add in an order of its own choice, and the log's coefficients follow from the norm; fsum takes
        # 4 ms for 60,000 numbers.
        norm = sqrt(fsum((gradient.astype(np.float64) ** 2).tolist()))
        if not self.rules.clip < norm < np.inf:
            return update, gradient
        factor = self.rules.clip / norm
        # The log must hold what was really applied, so the coefficients shrink, and the estimate is made again.
        parts = tuple(
            (device, (np.frombuffer(c, "<f4") * np.float64(factor)).astype("<f4").tobytes())
            for device, c in update.parts
        )
        clipped = Update(update.round, update.step, parts)
        return clipped, self._estimate(clipped, spread_over)

    def _advance(
        self, update: Update, values: Vector, buffers: list[Vector], replies: Sequence[Reply], total: int
    ) -> None:
        state = self.state
        if state.stats.size:
            shares = [reply.samples / total * np.frombuffer(reply.stats, "<f4").astype(np.float64) for reply in replies]
            state.stats = added(shares).astype(np.float32)
        # A device that answered holds the values of the round before; one that did not may never have been reached.
        state.last_seen[[reply.device for reply in replies]] = state.round
        state.values, state.buffers = values, buffers
        state.round += 1
        state.log_bytes = np.append(state.log_bytes, len(encode(update)))
        if self.devices_replay:
            self.log.append(update)
            # Updates that together outweigh the state will never be sent.
            kept, weight = 0, 0
            most = (1 + len(buffers)) * values.nbytes
            while kept < len(self.log) and (weight := weight + int(state.log_bytes[-1 - kept])) < most:
                kept += 1
            self.log = self.log[len(self.log) - kept :]
        self._asked, self._replies = set(), {}

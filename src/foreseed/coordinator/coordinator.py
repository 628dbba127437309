"""The coordinator: a state machine that takes messages and returns messages. It does no I/O.

A round: `open` samples devices and writes their orders, `receive` takes replies, `ask_others` replaces devices that do
not answer, and `close` takes what the method (`foreseed.methods.ntk_baffle`) made of the replies. The simulator and a
real fleet are thin drivers around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Literal

import numpy as np
import numpy.typing as npt

from foreseed.coordinator.answers import fault
from foreseed.coordinator.optimiser import Optimiser
from foreseed.coordinator.plausible import doubt, remembered, usual
from foreseed.coordinator.robust import gathered, limited
from foreseed.coordinator.sampling import sample
from foreseed.coordinator.sums import added
from foreseed.engine import ForeseedError
from foreseed.engine.blocks import Block, probed
from foreseed.engine.types import BITS, DirectionKind
from foreseed.wire import NOTHING_HELD, RUN_TAG, OrderMessage, Reply, Update, decode, encode, values_hash
from foreseed.wire.messages import MAX_DIRECTIONS

# The most that an order carries of the log: an order stays small whatever a device missed.
MAX_UPDATES_BYTES = 1 << 16

Vector = npt.NDArray[np.float32]


_CHOICES = {
    "kind": ("gaussian", "rademacher"),
    "seeds": ("per-device", "shared"),
    "robust": ("none", "clip", "trim"),
    "rate": ("fixed", "noise", "layers"),
}


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
    max_share: float = 1.0
    """The largest share of a round's samples that a single device counts for."""
    classes: int = 10
    """Of the images: how large a loss can be follows from it."""
    replay_numbers: int = 50_000_000
    """Most random numbers that a device is asked to make to catch up; a small board makes a few million a second."""
    rate: Literal["fixed", "noise", "layers"] = "fixed"
    """noise: the learning rate shrinks by the share of noise in the estimates; layers: each tensor's by its own."""
    memory: bool = False
    """The server remembers estimates, so an update is more than a few numbers: devices fetch the values."""
    bits: int = 32
    """Of a loss difference in a reply: 32, or packed in 1, 2, 4 or 8 (see `answers.py`)."""
    blocks: tuple[Block, ...] = ()
    """Groups of layers, each with directions of its own, k in all; without any, directions perturb all values."""

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            if (given := getattr(self, key)) not in known:
                raise ForeseedError(f"rules: {key} {given!r} given, expected one of {', '.join(known)}")
        if self.scalars > MAX_DIRECTIONS:
            raise ForeseedError(
                f"train.k {self.k} x train.local_steps {self.local_steps}: {self.scalars} loss differences do not fit "
                f"a reply, which holds {MAX_DIRECTIONS}; lower one of them"
            )
        if self.bits not in BITS:
            raise ForeseedError(f"rules: bits {self.bits!r} given, expected one of {', '.join(map(str, BITS))}")
        if self.bits < 32 and self.local_steps > 1:
            raise ForeseedError(
                f"train.bits below 32 only with train.local_steps = 1, not {self.local_steps}: a device's own steps "
                "follow its exact differences, which the server then would not have"
            )
        if self.blocks and (self.local_steps > 1 or sum(block.k for block in self.blocks) != self.k):
            raise ForeseedError(
                f"rules: {len(self.blocks)} blocks with {self.local_steps} local steps and k {self.k}: expected one "
                "step, and as many directions as the blocks have together"
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

    @property
    def probed(self) -> tuple[Block, ...]:
        """The blocks, or the one that all directions are."""
        return probed(self.blocks, self.k, self.spread)


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
    log: list[bytes] = field(default_factory=list)
    """The last updates, encoded: as many as may still be cheaper to send than the state."""
    recent: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))
    """What the last rounds' replies were like (see `plausible.py`); nothing without a robust rule."""


class Coordinator:
    """The server's side of a BP-free run."""

    def __init__(self, rules: Rules, optimiser: Optimiser, state: State) -> None:
        self.rules, self.optimiser, self.state = rules, optimiser, state
        self.refused: Counter[str] = Counter()
        """Replies that changed nothing, by reason."""
        self.declared: dict[int, int] = {}
        """How many samples each device said that it has, before it was asked."""
        self.usual = usual(state.recent)
        """What the rounds before the open one were like."""
        self._asked: set[int] = set()
        self._dismissed: set[int] = set()
        """Devices of the round whose reply was refused for what it says: they get no second one."""
        self._replies: dict[int, Reply] = {}
        self._hash = b""
        self._decoded: dict[bytes, Update] = {}

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
        self._asked, self._dismissed, self._replies = set(), set(), {}
        self._hash, self.usual = values_hash(self.state.values), usual(self.state.recent)
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
        """Devices that were asked, and whose answer is still to come."""
        return self._asked - self._replies.keys() - self._dismissed

    @property
    def dismissed(self) -> frozenset[int]:
        """Devices that were asked, and whose answer was refused."""
        return frozenset(self._dismissed)

    def receive(self, reply: Reply) -> str | None:
        """Take a reply; returns None, or why it was refused.

        A reply that is of no use counts for nothing, and its device is not waited for any more in this round; one that
        was not wanted changes nothing at all. Up to a colon, reasons are the same for all replies of a kind.
        """
        reason = self._unwanted(reply)
        if reason is None and (reason := self._useless(reply)) is not None:
            self._dismissed.add(reply.device)
        if reason is None:
            self._replies[reply.device] = reply
        else:
            self.refused[reason.partition(":")[0]] += 1
        return reason

    def forgive(self) -> set[int]:
        """Let the devices whose replies were refused be asked again in this round; returns who they are."""
        forgiven, self._dismissed = self._dismissed, set()
        self._asked -= forgiven
        return forgiven

    def close(self, update: Update, values: Vector, buffers: list[Vector]) -> None:
        """The round is over: take what its replies came to, and go to the next one."""
        state, replies = self.state, self.replies
        if state.stats.size:
            rows = np.stack([np.frombuffer(reply.stats, "<f4").astype(np.float64) for reply in replies])
            rows = rows if self.rules.robust == "none" else gathered(rows)
            counts = limited([reply.samples for reply in replies], self.rules)
            shares = [count / fsum(counts) * row for count, row in zip(counts, rows, strict=True)]
            state.stats = added(shares).astype(np.float32)
        if self.rules.robust != "none":
            state.recent = remembered(state.recent, replies, self.rules)
        # A device that answered holds the values of the round before; one that did not may never have been reached.
        state.last_seen[[reply.device for reply in replies]] = state.round
        state.values, state.buffers = values, buffers
        state.round += 1
        if self.devices_replay:
            encoded = encode(update)
            state.log.append(encoded)
            self._decoded[encoded] = update
            # Updates that together outweigh the state will never be sent.
            kept, weight = 0, 0
            most = (1 + len(buffers)) * values.nbytes
            while kept < len(state.log) and (weight := weight + len(state.log[-1 - kept])) < most:
                kept += 1
            state.log = state.log[len(state.log) - kept :]
        self._asked, self._dismissed, self._replies = set(), set(), {}

    # The catch-up: a device that keeps the optimiser's vectors can replay what it missed.

    @property
    def devices_replay(self) -> bool:
        """Whether devices keep the optimiser's state: where replaying the mean gap costs less than the values."""
        if self.rules.memory or self.rules.blocks:
            return False
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
        if seen < 0 or not behind or not self.devices_replay or len(self.state.log) < behind:
            return ()
        state = (1 + self.vectors) * self.state.values.nbytes
        if self._log_bytes(behind) >= min(state, MAX_UPDATES_BYTES):
            return ()
        missed = self.log[len(self.state.log) - behind :]
        directions = self.rules.scalars * sum(len(update.parts) for update in missed)
        return tuple(missed) if directions * len(self.state.values) <= self.rules.replay_numbers else ()

    @property
    def log(self) -> list[Update]:
        """The last updates, decoded once each."""
        self._decoded = {update: self._decoded.get(update) or _decode(update) for update in self.state.log}
        return list(self._decoded.values())

    def order_bytes(self, order: OrderMessage) -> int:
        """The size of an order on the wire. The updates in it were measured once, when they were made."""
        count = len(order.updates)
        head = 1 if count < 24 else 2 if count < 256 else 3
        # Inside an order an update goes without its version and type, a byte each.
        return len(encode(order._replace(updates=()))) - 1 + head + self._log_bytes(count) - 2 * count

    def _log_bytes(self, count: int) -> int:
        """The encoded size of the last updates, so many of them."""
        return sum(map(len, self.state.log[len(self.state.log) - count :]))

    def order(self, device: int) -> OrderMessage:
        """The open round's order for a device, with what it missed."""
        r = self.rules
        return OrderMessage(
            r.run, self.round, device, r.seed, r.k, r.sigma, r.kind == "rademacher", r.seeds == "shared",
            1 if r.blocks else r.spread, r.central, r.local_steps, r.local_lr, r.bits, self._hash,
            self.catch_up(device), r.blocks,
        )  # fmt: skip

    def _ask(self, pool: npt.ArrayLike, count: int) -> list[OrderMessage]:
        asked = sample(self.rules.seed, self.round, pool, count)
        self._asked.update(asked)
        return [self.order(device) for device in asked]

    def _unwanted(self, reply: Reply) -> str | None:
        if reply.run != self.rules.run[:RUN_TAG]:
            return "foreign run"
        if reply.round != self.round:
            return "late" if reply.round < self.round else "early"
        if reply.device not in self._asked:
            return "unasked device"
        if reply.device in self._replies:
            return "duplicate"
        if reply.device in self._dismissed:
            return "refused before"
        return None if self.missing else "not needed any more"

    def _useless(self, reply: Reply) -> str | None:
        if len(reply.stats) != self.state.stats.nbytes:
            return "wrong length"
        if reply.stats and not np.isfinite(np.frombuffer(reply.stats, "<f4")).all():
            return "not finite"
        return fault(reply, self.rules) or doubt(reply, self.rules, self.declared.get(reply.device), self.usual)


def _decode(update: bytes) -> Update:
    decoded = decode(update, Update, limit=len(update))
    assert isinstance(decoded, Update)
    return decoded

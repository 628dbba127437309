"""A server that remembers each device's last estimate (FedVARP, Jhunjhunwala et al.; SAGA over devices).

Which devices were asked is noise: a round's mean is that of ten devices, not of all. With y_j the last estimate of
device j and m the weighted mean of all that are remembered,

    g = sum over the devices asked of w_i (g_i - a (y_i - m))        y_i <- y_i + c (g_i - y_i) afterwards

has the same mean for any a, and the a of least variance is the slope b of a regression of what devices say on what they
said last time: near 1 where estimates are good and recent, near 0 where y_i is noise or too old. It is measured, round
by round, and for each tensor of the model: devices differ most in their classes, so in the last layer's few biases,
where an estimate is good.

Least variance is not least harm. An estimate's noise is spread evenly over all directions, most of which the loss
hardly feels; what devices differ by lies where the loss is steep. Counted HARM times as much, a = HARM b / (HARM b +
1 - b). A device that was never heard has y_i = m. One that was heard before is not forgotten: with c the share of
signal in the estimates, y_i is a mean over its last ones, less noisy, and as old as it takes; exact gradients have
c = 1. Devices take no notice of any of this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreseed.coordinator.sums import Doubles, added, dots
from foreseed.engine import ForeseedError
from foreseed.methods.protocol import UNSAVED, Vector

_DECAY = 0.9
"""Of the regression's sums, a round: long enough to steady it, short enough to follow training."""
HARM = 50.0
"""Of a unit of variance between devices against one of the estimates' own noise; 1 and infinity learnt less."""
_FILE = "memory.f32"


def _nothing() -> Vector:
    return np.zeros((0, 0), np.float32)


@dataclass
class Memory:
    """The last estimate of as many devices as there is room for; the longest unheard are forgotten first.

    A checkpoint holds the rows of its own round, the file all earlier ones: `remember` puts a round's rows into the
    file when the next one comes, so that at any moment the two together are the memory at the checkpoint's round.
    """

    slots: npt.NDArray[np.int32]
    """Where each device's estimate lies; -1 = nowhere."""
    heard: npt.NDArray[np.int32]
    """The round in which each device was last heard."""
    counts: Doubles
    """Samples of each device that is remembered."""
    total: Doubles
    """All that is remembered, each times its samples."""
    sizes: npt.NDArray[np.int64]
    """Of the model's tensors."""
    products: Doubles
    """Each tensor's regression: what devices say times what they said and, as `squares`, what they said squared."""
    squares: Doubles
    fresh: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Slots of the last round's estimates, which are `fresh_rows`."""
    fresh_rows: Vector = field(default_factory=_nothing)
    rows: Vector = field(default_factory=_nothing, metadata=UNSAVED)
    """The file, or, without one, memory."""

    @staticmethod
    def of(devices: int, per_round: int, sizes: Sequence[int], most_bytes: int) -> Memory:
        """An empty memory for so many devices with estimates of tensors of these sizes, in at most so many bytes."""
        n = sum(sizes)
        room = min(devices, most_bytes // (4 * n))
        if room < per_round:
            raise ForeseedError(
                f"train.memory_bytes {most_bytes} has room for {room} estimates of {4 * n} bytes, expected at least "
                f"data.per_round, which is {per_round}; raise it, or set train.memory to false"
            )
        return Memory(
            np.full(devices, -1, np.int32), np.zeros(devices, np.int32), np.zeros(devices), np.zeros(n),
            np.array(sizes), np.zeros(len(sizes)), np.zeros(len(sizes)), rows=np.zeros((room, n), np.float32),
        )  # fmt: skip

    def keep_in(self, folder: Path) -> None:
        """Lie in a file there from now on: that of the checkpoint that was restored, or a new one."""
        path, (room, n), begun = folder / _FILE, self.rows.shape, bool((self.slots >= 0).any())
        if begun and (not path.exists() or path.stat().st_size != 4 * room * n):
            raise ForeseedError(f"{path} is not there as the checkpoint needs it; start the run anew")
        if not begun:
            folder.mkdir(parents=True, exist_ok=True)
            _reserve(path, 4 * room * n)
        self.rows = np.memmap(path, np.float32, "r+", shape=(room, n))

    @property
    def shares(self) -> Doubles:
        """How much of what is remembered counts, tensor by tensor."""
        known = self.squares > 0
        slopes: Doubles = np.where(known, np.clip(self.products / np.where(known, self.squares, 1.0), 0.0, 1.0), 0.0)
        shares: Doubles = HARM * slopes / (HARM * slopes + 1 - slopes)
        return shares

    @property
    def share(self) -> float:
        """The share of what devices are known to differ by that counts, over all tensors."""
        total = fsum(self.squares)
        return fsum(self.shares * self.squares) / total if total > 0 else 0.0

    def corrected(self, devices: Sequence[int], given: Sequence[Doubles], weights: Doubles) -> Sequence[Doubles]:
        """The estimates g_i - a (y_i - m) of the devices asked, for their g_i."""
        known_weight = fsum(self.counts[self.slots >= 0])
        if not known_weight:
            return given
        middle = self.total / known_weight
        known = [(i, self._row(device) - middle) for i, device in enumerate(devices) if self.slots[device] >= 0]
        if len(known) > 1:
            self._regress([(weights[i], given[i], y) for i, y in known])
        shares, corrected = np.repeat(self.shares, self.sizes), list(given)
        for i, y in known:
            corrected[i] = given[i] - shares * y
        return corrected

    def _regress(self, known: Sequence[tuple[float, Doubles, Doubles]]) -> None:
        """Add a round's (weight, g_i, y_i - m) to the regression."""
        total = fsum(weight for weight, _, _ in known)
        shares = np.array([weight / total for weight, _, _ in known])
        mean = added(share * given for share, (_, given, _) in zip(shares, known, strict=True))
        products, squares = np.zeros(len(self.sizes)), np.zeros(len(self.sizes))
        for share, (_, given, y) in zip(shares, known, strict=True):
            products += share * dots(given - mean, y, self.sizes)
            squares += share * dots(y, y, self.sizes)
        # The mean has a part of every one of them, which takes that much off.
        self.products = _DECAY * self.products + products / (1 - fsum(shares**2))
        self.squares = _DECAY * self.squares + squares

    def remember(
        self, round: int, devices: Sequence[int], estimates: Sequence[Doubles], counts: Doubles, share: float = 1.0
    ) -> None:
        """Keep what these devices said in this round; where they were heard before, it counts for `share`."""
        self._settle()
        rows, slots = [], []
        for device, estimate, count in zip(devices, estimates, counts, strict=True):
            known = self.slots[device] >= 0 and share < 1
            row = (share * estimate + (1 - share) * self._row(device) if known else estimate).astype(np.float32)
            slot = self._slot(device)
            self.slots[device], self.heard[device], self.counts[device] = slot, round, count
            self.total += count * row.astype(np.float64)
            rows.append(row)
            slots.append(slot)
        self.fresh, self.fresh_rows = np.array(slots, np.int32), np.stack(rows)

    def _settle(self) -> None:
        """Put the last round's rows where they belong; its checkpoint, which holds them too, is on the disk."""
        if self.fresh.size:
            self.rows[self.fresh] = self.fresh_rows
            if isinstance(self.rows, np.memmap):
                self.rows.flush()
        self.fresh = np.zeros(0, np.int32)

    def _slot(self, device: int) -> int:
        """The device's own slot, a free one, or that of the device that was longest not heard; without its old row."""
        held = np.flatnonzero(self.slots >= 0)
        if self.slots[device] < 0 and len(held) < len(self.rows):
            return len(held)  # slots are filled in turn, and only ever handed on
        owner = device if self.slots[device] >= 0 else int(held[np.argmin(self.heard[held])])
        slot = int(self.slots[owner])
        self.total -= self.counts[owner] * self._row(owner)
        self.slots[owner] = -1
        return slot

    def _row(self, device: int) -> Doubles:
        slot = self.slots[device]
        fresh = np.flatnonzero(self.fresh == slot)
        row: Doubles = (self.fresh_rows[fresh[0]] if len(fresh) else self.rows[slot]).astype(np.float64)
        return row


def _reserve(path: Path, size: int) -> None:
    """A new file of zeros; the disk holds all of it from the beginning."""
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            path.unlink()
            raise ForeseedError(
                f"{path}: no room for {size} bytes of memory ({error.strerror}); lower train.memory_bytes"
            ) from None

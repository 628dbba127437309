"""A server that remembers each device's last estimate (FedVARP, Jhunjhunwala et al.; SAGA over devices).

Which devices were asked is noise: a round's mean is that of ten devices, not of all. With y_j the last estimate of
device j and m the weighted mean of all that are remembered,

    g = sum over the devices asked of w_i (g_i - a (y_i - m))        y_i <- g_i afterwards

has the same mean for any a, and the a of least variance is the slope of a regression of what devices say on what they
said last time: near 1 where estimates are good and recent, near 0 where y_i is noise or too old. It is measured, round
by round; a device that was never heard has y_i = m. Devices take no notice of any of this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreseed.engine import ForeseedError
from foreseed.methods.protocol import UNSAVED, Vector
from foreseed.methods.sums import dot, square

_DECAY = 0.9
"""Of the regression's sums, a round: long enough to steady it, short enough to follow training."""

Doubles = npt.NDArray[np.float64]


@dataclass
class Memory:
    """The last estimate of as many devices as there is room for; the longest unheard are forgotten first."""

    slots: npt.NDArray[np.int32]
    """Where each device's estimate lies; -1 = nowhere."""
    heard: npt.NDArray[np.int32]
    """The round in which each device was last heard."""
    samples: npt.NDArray[np.int64]
    """Of each device that is remembered."""
    total: Doubles
    """All that is remembered, each times its samples."""
    products: float = 0.0
    """What devices say, times what they said: the regression's sums; and, as `squares`, what they said, squared."""
    squares: float = 0.0
    rows: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32), metadata=UNSAVED)
    fresh: dict[int, Vector] = field(default_factory=dict, metadata=UNSAVED)
    """Rows of the round that is being closed, by slot."""

    @staticmethod
    def of(devices: int, n: int, most_bytes: int) -> Memory:
        """An empty memory for so many devices with estimates of n numbers, in at most so many bytes."""
        room = min(devices, most_bytes // (4 * n))
        if room < 2:
            raise ForeseedError(
                f"train.memory_bytes {most_bytes} has room for {room} estimates of {4 * n} bytes, expected at least "
                "two; raise it, or set train.memory to false"
            )
        return Memory(
            np.full(devices, -1, np.int32), np.zeros(devices, np.int32), np.zeros(devices, np.int64), np.zeros(n),
            rows=np.zeros((room, n), np.float32),
        )  # fmt: skip

    @property
    def share(self) -> float:
        """The regression's slope: how much of what is remembered counts."""
        return min(max(self.products / self.squares, 0.0), 1.0) if self.squares > 0 else 0.0

    def corrected(self, devices: Sequence[int], given: Sequence[Doubles], weights: Doubles) -> Sequence[Doubles]:
        """The estimates g_i - a (y_i - m) of the devices asked, for their g_i."""
        known = [device for device in devices if self.slots[device] >= 0]
        count = int(self.samples[self.slots >= 0].sum())
        if not count:
            return given
        middle = self.total / count
        surprises = {device: self._row(device).astype(np.float64) - middle for device in known}
        if len(known) > 1:
            mine = [(w, g, surprises[d]) for d, g, w in zip(devices, given, weights, strict=True) if d in surprises]
            mean = sum((w * g for w, g, _ in mine), np.zeros_like(middle)) / sum(w for w, _, _ in mine)
            self.products = _DECAY * self.products + sum(w * dot(g - mean, y) for w, g, y in mine)
            self.squares = _DECAY * self.squares + sum(w * square(y) for w, _, y in mine)
        a = self.share
        return [g - a * surprises[d] if d in surprises else g for d, g in zip(devices, given, strict=True)]

    def remember(self, round: int, devices: Sequence[int], estimates: Sequence[Doubles], samples: Sequence[int]) -> None:
        """Keep what these devices said in this round."""
        for device, estimate, count in zip(devices, estimates, samples, strict=True):
            if self.slots[device] >= 0:
                self._take_off(device)
            slot = self._slot(device, round)
            self.fresh[slot] = estimate.astype(np.float32)
            self.slots[device], self.heard[device], self.samples[device] = slot, round, count
            self.total += count * self.fresh[slot].astype(np.float64)

    def _slot(self, device: int, round: int) -> int:
        """The device's own slot, a free one, or that of the device that was longest not heard."""
        if self.slots[device] >= 0:
            return int(self.slots[device])
        used = self.slots[self.slots >= 0]
        if len(used) < len(self.rows):
            return len(used)  # slots are filled in turn and never given back
        held = np.flatnonzero(self.slots >= 0)
        oldest = int(held[np.argmin(self.heard[held])])
        slot = int(self.slots[oldest])
        self._take_off(oldest)
        self.slots[oldest] = -1
        return slot

    def _take_off(self, device: int) -> None:
        self.total -= int(self.samples[device]) * self._row(device).astype(np.float64)

    def _row(self, device: int) -> Vector:
        slot = int(self.slots[device])
        row: Vector = self.fresh.get(slot, self.rows[slot])
        return row

"""Devices whose answers pull against all others', round after round, are left out.

A reply with every sign turned round looks like any other: it is of the right size, and its noise hides it. But noise
goes with the number of rounds, and what it hides does not. In every round each device's part of the estimate is
compared with the sum of the others': the cosine of the two, in units of what chance alone would make of it. Added up
over the rounds that a device took part in, and measured by how much devices differ, that tells who pulls against the
rest. An honest device whose images are quite unlike all others' can look the same, so it takes strong evidence, a
device that agrees again counts again, never more than a minority is left out, and nobody while most devices do not
agree: near the end of training the slopes of all cancel, and honest devices pull against one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreseed.coordinator.robust import median
from foreseed.coordinator.sums import Doubles, square
from foreseed.engine import compare
from foreseed.methods.protocol import Vector

_DECAY = 0.95
"""Of what was seen before, each time that a device takes part."""
_EVIDENCE = 3.0
"""Standard deviations below nothing at which a device is left out."""
_NORMAL = 1.4826
"""The standard deviation of normal numbers, in median distances from their median."""
_FEWEST = 3
"""Devices of a round that can outvote one of them."""


@dataclass
class Agreement:
    """How well each device has agreed with the others so far; a checkpoint keeps it."""

    sums: Doubles
    """Of each device's agreement, round by round."""
    squares: Doubles
    """What the squares of the sums would be by chance, in units of `spread` squared."""
    spread: float = 1.0
    """By how much devices' agreement differs in a round."""

    @staticmethod
    def of(devices: int) -> Agreement:
        """Nothing is known of so many devices."""
        return Agreement(np.zeros(devices), np.zeros(devices))

    def opposed(self, devices: Sequence[int], halves: Vector) -> list[int]:
        """Which of a round's devices have pulled against the others, this round counted; `halves` are their parts."""
        if len(devices) < _FEWEST:
            return []
        seen = agreements(halves)
        middle = median(seen)
        now = max(1.0, _NORMAL * median(np.abs(seen - middle)))
        self.spread = now if not self.squares.any() else _DECAY * self.spread + (1 - _DECAY) * now
        for device, one in zip(devices, seen, strict=True):
            self.sums[device] = _DECAY * self.sums[device] + one
            self.squares[device] = _DECAY**2 * self.squares[device] + 1
        evidence = self.sums / (self.spread * np.sqrt(np.where(self.squares > 0, self.squares, 1.0)))
        if median(evidence[self.squares > 0]) <= 0:
            return []
        worst = sorted(devices, key=lambda device: evidence[device])[: (len(devices) - 1) // 2]
        return [device for device in worst if evidence[device] < -_EVIDENCE]


def agreements(halves: Vector) -> Doubles:
    """Of each device's part with the sum of the others': about 0 with a deviation of 1 where there is only noise."""
    count, _, n = halves.shape
    sums, products = np.empty((2, n)), np.empty((count, 2))
    compare(halves, n, sums, products)
    own, common = products.T
    lengths = own * (square(sums[0] + sums[1]) - 2 * common + own)
    known = lengths > 0
    seen: Doubles = np.where(known, np.sqrt(n / np.where(known, lengths, 1.0)) * (common - own), 0.0)
    return seen

"""How much of a round's estimate is signal, and the learning rate that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import numpy.typing as npt

from foreseed.coordinator.sums import Doubles, dots, square

_DECAY = 0.95
"""Of the averages, a round: single rounds say little."""
_LEAST = 1e-3
"""Signal for the noise, at least: less cannot be told from none."""


@dataclass
class Noise:
    """Squared lengths of a round's signal and noise, averaged over rounds.

    Noise is what the directions bring in: half of a device's directions give another estimate than the other half, and
    the squared difference of the two is that of their sum from the truth. What the choice of devices brings in is
    not in it: ten devices of a hundred differ too much for a round to tell that from signal.
    """

    signal: float = 0.0
    noise: float = 0.0
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of the model's tensors; none where they are not told apart."""
    signals: Doubles = field(default_factory=lambda: np.zeros(0))
    noises: Doubles = field(default_factory=lambda: np.zeros(0))
    """Squared lengths by tensor."""

    @staticmethod
    def of(sizes: Sequence[int]) -> Noise:
        """One that tells the tensors apart."""
        return Noise(sizes=np.array(sizes), signals=np.zeros(len(sizes)), noises=np.zeros(len(sizes)))

    def measure(self, first: Doubles, second: Doubles) -> float | None:
        """The signal-to-noise ratio of one round, from two halves of its estimate."""
        whole, difference = first + second, first - second
        length, noise = square(whole), square(difference)
        self.signal = _DECAY * self.signal + (1 - _DECAY) * (length - noise)
        self.noise = _DECAY * self.noise + (1 - _DECAY) * noise
        if len(self.sizes):
            lengths, noises = dots(whole, whole, self.sizes), dots(difference, difference, self.sizes)
            self.signals = _DECAY * self.signals + (1 - _DECAY) * (lengths - noises)
            self.noises = _DECAY * self.noises + (1 - _DECAY) * noises
        return (length - noise) / noise if noise > 0 else None

    @property
    def signal_share(self) -> float:
        """How much of an estimate's squared length is signal: 1 without noise."""
        return _signal_share(self.signal, self.noise)

    @property
    def share(self) -> float:
        """The share of the learning rate that the noise leaves: the share of signal to the power of 3/8.

        It is what tuned rates of very different estimates (K = 50 to 6,400, dense and pruned) have in common, no more
        (docs/theory.md): 1 without noise, a half where there is five times as much noise as signal.
        """
        return _rate_share(self.signal_share)

    @property
    def shares(self) -> Doubles:
        """The same for every number of an estimate, by the noise of the tensor that it belongs to."""
        pairs = zip(self.signals, self.noises, strict=True)
        return np.repeat([_rate_share(_signal_share(signal, noise)) for signal, noise in pairs], self.sizes)


def _signal_share(signal: float, noise: float) -> float:
    if not noise > 0:
        return 1.0
    signal = max(signal, _LEAST * noise)
    return signal / (signal + noise)


def _rate_share(signal_share: float) -> float:
    quarter = sqrt(sqrt(signal_share))
    return quarter * sqrt(quarter)  # roots are the same bits everywhere, other powers are not

"""How much of a round's estimate is signal, and the learning rate that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

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

    def measure(self, length: float, noise: float) -> float | None:
        """The signal-to-noise ratio of one round, from the squared lengths of its estimate and of the noise in it."""
        self.signal = _DECAY * self.signal + (1 - _DECAY) * (length - noise)
        self.noise = _DECAY * self.noise + (1 - _DECAY) * noise
        return (length - noise) / noise if noise > 0 else None

    @property
    def signal_share(self) -> float:
        """How much of an estimate's squared length is signal: 1 without noise."""
        if not self.noise > 0:
            return 1.0
        signal = max(self.signal, _LEAST * self.noise)
        return signal / (signal + self.noise)

    @property
    def share(self) -> float:
        """The share of the learning rate that the noise leaves: the share of signal to the power of 3/8.

        It is what tuned rates of very different estimates (K = 50 to 6,400, dense and pruned) have in common, no more
        (docs/theory.md): 1 without noise, a half where there is five times as much noise as signal.
        """
        quarter = sqrt(sqrt(self.signal_share))
        return quarter * sqrt(quarter)  # roots are the same bits everywhere, other powers are not

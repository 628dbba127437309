"""How much of a round's estimate is signal, from how far devices are apart, and the rate that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt

from foreseed.coordinator.robust import added
from foreseed.methods.sums import Doubles, square

_DECAY = 0.95
"""Of the averages, a round: single rounds say little."""
_LEAST = 1e-3
"""Signal for the noise, at least: less cannot be told from none with a round's few devices."""


@dataclass
class Noise:
    """Squared lengths of a round's signal and noise, averaged over rounds."""

    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0
    """Of the rounds so far: averages of few rounds are not pulled to 0."""

    def measure(self, estimates: Sequence[Doubles], weights: Doubles, taken: Doubles) -> float | None:
        """The signal-to-noise ratio of one round, from what devices said and what was made of it; None for one device.

        Products of different devices' estimates hold no noise but by chance, neither of which directions they probed
        nor of which devices were asked: their mean is the signal, and the rest of what is `taken` for it noise. What
        the memory has corrected would not do for this: there, devices share the noise of its mean.
        """
        if len(estimates) < 2:
            return None
        mean = added(w * g for w, g in zip(weights, estimates, strict=True))
        own = fsum(float(w) ** 2 * square(g) for w, g in zip(weights, estimates, strict=True))
        signal = (square(mean) - own) / (1 - fsum(weights**2))
        noise = square(taken) - signal
        self.signal = _DECAY * self.signal + (1 - _DECAY) * signal
        self.noise = _DECAY * self.noise + (1 - _DECAY) * noise
        self.weight = _DECAY * self.weight + (1 - _DECAY)
        return signal / noise if noise > 0 else None

    @property
    def share(self) -> float:
        """The share of the learning rate that the noise leaves: the root of the cosine between estimate and gradient.

        What tuned rates of very different estimates (K = 50 to 6,400, dense and pruned) have in common: see
        docs/theory.md. It is 1 without noise, and 0.6 where there is eight times as much noise as signal.
        """
        if not self.weight:
            return 1.0
        signal = max(self.signal, _LEAST * self.noise)
        return sqrt(sqrt(signal / (signal + self.noise))) if self.noise > 0 else 1.0

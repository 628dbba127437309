"""How much of a round's estimate is signal, from how far devices are apart, and the rate that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from foreseed.methods.sums import Doubles, square

_DECAY = 0.9
"""Of the averages, a round: single rounds say little."""


@dataclass
class Noise:
    """Squared lengths of a round's signal and noise, averaged over rounds."""

    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0
    """Of the rounds so far: averages of few rounds are not pulled to 0."""

    def measure(self, estimates: Sequence[Doubles], mean: Doubles, weights: Doubles) -> float | None:
        """The signal-to-noise ratio of one round; None where a single device answered.

        With g = sum of w_i g_i, the differences g_i - g hold all noise there is: which devices were asked, which
        directions they probed. What is left of |g|^2 is signal.
        """
        if len(estimates) < 2:
            return None
        apart = fsum(float(w) ** 2 * square(g - mean) for w, g in zip(weights, estimates, strict=True))
        # The mean lies nearer to its own parts than the truth does: for equal weights by (m - 1) / m.
        squares, cubes = fsum(weights**2), fsum(weights**3)
        noise = apart * squares / (squares - 2 * cubes + squares**2)
        signal = square(mean) - noise
        self.signal = _DECAY * self.signal + (1 - _DECAY) * signal
        self.noise = _DECAY * self.noise + (1 - _DECAY) * noise
        self.weight = _DECAY * self.weight + (1 - _DECAY)
        return signal / noise if noise > 0 else None

    def share(self, momentum: float) -> float:
        """The share of signal in what momentum makes of the estimates, from 0 to 1.

        Momentum averages noise over some (1 + mu) / (1 - mu) rounds. On a bowl this share of the longest stable step
        is the step that gains most.
        """
        if not self.weight:
            return 1.0
        noise = self.noise * (1 - momentum) / (1 + momentum)
        signal = max(self.signal, 0.0)
        return signal / (signal + noise) if signal + noise > 0 else 1.0

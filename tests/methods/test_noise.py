"""Signal and noise of a round's estimates, and the share of the rate that follows."""

from __future__ import annotations

import numpy as np
import pytest

from foreseed.methods.noise import Noise


def measured(signal: float, noise: float, seed: int, weights: list[float]) -> Noise:
    rng, truth, meter = np.random.default_rng(seed), np.full(200, signal / np.sqrt(200)), Noise()
    for _ in range(60):
        estimates = [truth + noise * rng.normal(size=200) / np.sqrt(200) for _ in weights]
        mean = sum(w * g for w, g in zip(weights, estimates, strict=True))
        meter.measure(estimates, np.array(weights), np.asarray(mean))
    return meter


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.5, 0.2, 0.2, 0.1]])
def test_signal_and_noise_are_found_apart(weights: list[float]) -> None:
    # Of the mean: noise falls with the squared weights.
    expected = 4.0 * sum(w * w for w in weights)
    meters = [measured(1.5, 2.0, seed, weights) for seed in range(20)]
    for name, truth in (("signal", 1.5**2), ("noise", expected)):
        found = np.array([getattr(meter, name) / meter.weight for meter in meters])
        assert abs(found.mean() - truth) < 4 * found.std() / np.sqrt(len(found))
        assert found.std() < 0.3 * truth


def test_share_falls_with_noise_as_the_root_of_the_cosine() -> None:
    quiet, loud = (measured(1.0, noise, 0, [0.25] * 4) for noise in (0.5, 8.0))
    assert quiet.share == pytest.approx((1 / (1 + 0.25 / 4)) ** 0.25, abs=0.01)
    assert loud.share == pytest.approx((1 / (1 + 64 / 4)) ** 0.25, abs=0.05)
    nothing = measured(0.0, 8.0, 0, [0.25] * 4)
    assert 0.17 < nothing.share < 0.4


def test_nothing_measured_is_the_whole_rate() -> None:
    meter = Noise()
    assert meter.measure([np.ones(3)], np.ones(1), np.ones(3)) is None
    assert meter.share == 1

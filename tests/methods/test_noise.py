"""Signal and noise of a round's estimate, and the share of the rate that follows."""

from __future__ import annotations

import numpy as np
import pytest

from foreseed.methods.descent import Descent
from foreseed.methods.noise import Noise


def measured(signal: float, noise: float, seed: int, devices: int = 4) -> Noise:
    """Of the mean of devices whose two halves have so much noise each, 200 numbers."""
    rng, truth, descent = np.random.default_rng(seed), np.full(200, signal / np.sqrt(200)), Descent(Noise())
    counts = np.arange(1.0, devices + 1)
    weights = counts / counts.sum()
    for number in range(1, 200):
        halves = truth + noise * rng.normal(size=(devices, 2, 200)) / np.sqrt(200)
        parts = (weights[:, None, None] * halves / 2).astype(np.float32)
        mean, snr = descent.combine(number, list(range(devices)), counts, parts)
        assert snr is not None
        np.testing.assert_allclose(mean, parts.sum(axis=(0, 1)), rtol=1e-4, atol=1e-6)
    return descent.noise


def test_signal_and_noise_are_found_apart() -> None:
    weights = np.arange(1, 5) / 10
    expected = 4.0 * np.square(weights).sum() / 2  # of the mean of two halves, of the mean over devices
    meters = [measured(1.5, 2.0, seed) for seed in range(20)]
    for name, truth in (("signal", 1.5**2), ("noise", expected)):
        found = np.array([getattr(meter, name) for meter in meters])
        assert abs(found.mean() - truth) < 4 * found.std() / np.sqrt(len(found))
        assert found.std() < 0.2 * truth


def test_share_falls_with_noise() -> None:
    quiet, loud, nothing = (measured(*pair, 0) for pair in ((1.0, 0.5), (1.0, 8.0), (0.0, 8.0)))
    assert quiet.share == pytest.approx((1 / (1 + 0.25 * 0.3 / 2)) ** 0.375, abs=0.01)
    assert loud.share == pytest.approx((1 / (1 + 64 * 0.3 / 2)) ** 0.375, abs=0.05)
    # Of 200 numbers, noise is known to a few per cent.
    assert 0.07 < nothing.share < 0.05**0.375


def test_nothing_measured_is_the_whole_rate() -> None:
    descent = Descent(Noise())
    mean, snr = descent.combine(1, [0, 1], np.ones(2), np.ones((2, 1, 3), np.float32))
    assert (mean.tolist(), snr, descent.noise.share) == ([2.0] * 3, None, 1.0)


def test_tensors_have_shares_of_their_own() -> None:
    """The first of two tensors is all signal, the second all noise; together they are what one tensor would be."""
    rng, apart, together = np.random.default_rng(0), Noise.of([150, 50]), Noise()
    for _ in range(200):
        halves = rng.normal(size=(2, 200)) * np.repeat([0.0, 1.0], [150, 50]) + np.repeat([1.0, 0.0], [150, 50])
        assert apart.measure(*halves) == together.measure(*halves)
    assert (apart.signal, apart.noise, apart.share) == (together.signal, together.noise, together.share)
    assert apart.signals.sum() == pytest.approx(apart.signal)
    assert apart.noises.sum() == pytest.approx(apart.noise)
    shares = apart.shares
    assert shares[:150].tolist() == [1.0] * 150
    assert len(set(shares[150:])) == 1
    assert shares[150] < 0.5

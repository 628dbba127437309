"""Who pulls against all others is found by and by, whatever hides it in a single round."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from foreseed.methods.agreement import Agreement, agreements

N = 400
DEVICES = range(10)


def halves(rng: np.random.Generator, flipped: set[int], noise: float) -> np.ndarray:
    """Parts of ten devices of one gradient, in noise that many times as long; some have the other sign."""
    truth = rng.normal(size=N)
    truth /= np.linalg.norm(truth)
    parts = truth + noise / np.sqrt(N) * rng.normal(size=(len(DEVICES), 2, N))
    parts[list(flipped)] *= -1
    return parts.astype(np.float32)


def left_out(seed: int, flipped: set[int], noise: float, rounds: int = 40) -> tuple[Counter[int], list[set[int]]]:
    rng, agreement = np.random.default_rng(seed), Agreement.of(len(DEVICES))
    found = [set(agreement.opposed(DEVICES, halves(rng, flipped, noise))) for _ in range(rounds)]
    return Counter(device for some in found for device in some), found


def test_noise_alone_agrees_with_nothing_by_a_deviation_of_one() -> None:
    rng = np.random.default_rng(0)
    seen = np.stack([agreements(rng.normal(size=(10, 2, N)).astype(np.float32)) for _ in range(200)])
    # Of ten, each agrees or not with the sum of the nine others: hardly one with the next.
    assert abs(seen.mean()) < 4 / np.sqrt(seen.size)
    assert 0.9 < seen.std() < 1.1


@pytest.mark.parametrize("seed", range(5))
def test_those_with_the_other_sign_are_left_out_and_no_others(seed: int) -> None:
    counts, found = left_out(seed, {3, 7}, noise=2.0)
    assert set(counts) == {3, 7}
    assert all(some == {3, 7} for some in found[20:])


@pytest.mark.parametrize("seed", range(5))
def test_of_devices_that_all_say_the_same_none_is_left_out(seed: int) -> None:
    for noise in (0.5, 2.0, 8.0):
        assert not left_out(seed, set(), noise)[0]


@pytest.mark.parametrize("seed", range(5))
def test_where_the_slopes_of_all_cancel_nobody_is_left_out(seed: int) -> None:
    rng, agreement = np.random.default_rng(seed), Agreement.of(len(DEVICES))
    slopes = rng.normal(size=(len(DEVICES), 1, N))
    slopes -= slopes.mean(axis=0)  # the loss is at its least: who is asked pulls against the others that are
    for _ in range(60):
        asked = rng.choice(len(DEVICES), 6, replace=False)
        parts = (slopes[asked] + rng.normal(size=(6, 2, N))).astype(np.float32)
        assert agreement.opposed(asked.tolist(), parts) == []


def test_never_more_than_a_minority_is_left_out() -> None:
    rng, agreement = np.random.default_rng(1), Agreement.of(len(DEVICES))
    for _ in range(30):
        assert len(agreement.opposed(DEVICES, halves(rng, {0, 1, 2, 3, 4, 5}, 1.0))) <= 4
    assert agreement.opposed([0, 1], halves(rng, {1}, 0.1)[:2]) == []


def test_a_device_that_agrees_again_counts_again() -> None:
    rng, agreement = np.random.default_rng(2), Agreement.of(len(DEVICES))
    for _ in range(10):
        found = agreement.opposed(DEVICES, halves(rng, {4}, 1.0))
    assert found == [4]
    for _ in range(40):
        found = agreement.opposed(DEVICES, halves(rng, set(), 1.0))
    assert found == []


def test_a_device_that_says_nothing_harms_nobody() -> None:
    rng, agreement = np.random.default_rng(3), Agreement.of(len(DEVICES))
    for _ in range(10):
        parts = halves(rng, set(), 1.0)
        parts[5] = 0
        assert agreement.opposed(DEVICES, parts) == []
    assert agreement.sums[5] == 0

"""Robust aggregation: liars move a round little, and honest rounds hardly change."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.coordinator import Coordinator, Optimiser, Rules
from foreseed.coordinator.robust import CLIP, GROWTH, SHARE, contained, gathered, limited, median, trimmed_mean
from foreseed.coordinator.sums import added
from foreseed.engine import SHARED_DEVICE, Directions, ForeseedError, project, quantise
from foreseed.methods.ntk_baffle import learn
from foreseed.wire import RUN_TAG, OrderMessage, Reply

N, M, K, SIGMA = 600, 10, 40, 1e-3
SHARED = Rules(b"run-name", seed=5, devices=M, per_round=M, k=K, sigma=SIGMA, seeds="shared")
TRIM = replace(SHARED, robust="trim", trim=0.2)
CLIPPED = replace(SHARED, robust="clip")

Array = npt.NDArray[np.float64]
Lie = Callable[[Reply], Reply]


def honest(order: OrderMessage) -> Reply:
    """A device's reply where the devices agree on the gradient but for what their own images add to it."""
    common = np.random.default_rng(1).normal(size=N)
    own = common + 0.5 * np.random.default_rng([2, order.device]).normal(size=N)
    device = SHARED_DEVICE if order.shared else order.device
    slopes = np.array(project(Directions(order.seed, order.round, device, K), own.astype(np.float32)))
    samples = 80 + 8 * order.device
    differences = array("f", SIGMA * slopes)
    if order.bits == 32:
        losses = array("f", [2.3, *differences]).tobytes()
    else:
        scale, codes = quantise(differences, order.bits, order.seed, order.round, order.device)
        losses = array("f", [2.3, scale]).tobytes() + codes
    return Reply(order.run[:RUN_TAG], order.round, order.device, samples, losses)


def times(factor: float) -> Lie:
    def lie(reply: Reply) -> Reply:
        losses = np.frombuffer(reply.losses, "<f4").copy()
        losses[1:] *= factor
        return reply._replace(losses=losses.tobytes())

    return lie


def times_its_scale(factor: float) -> Lie:
    """What a liar of few bits can do: its codes are signs or levels, only their scale can be large."""

    def lie(reply: Reply) -> Reply:
        scale = factor * np.frombuffer(reply.losses, "<f4", 2)[1:]
        return reply._replace(losses=reply.losses[:4] + scale.astype("<f4").tobytes() + reply.losses[8:])

    return lie


def flipped(reply: Reply) -> Reply:
    return reply._replace(losses=reply.losses[:8] + bytes(255 - byte for byte in reply.losses[8:]))


def many_samples(reply: Reply) -> Reply:
    return times(-1)(reply)._replace(samples=2**31)


def estimate(rules: Rules, liars: Sequence[int] = (), lie: Lie = lambda reply: reply) -> Array:
    """What the server takes for the gradient of a round."""
    coordinator = Coordinator.start(rules, Optimiser(lr=1.0, momentum=0.0), np.zeros(N))
    for order in coordinator.open():
        reply = honest(order)
        assert coordinator.receive(lie(reply) if order.device in liars else reply) is None
    learn(coordinator)
    return -coordinator.state.values.astype(np.float64)


def moved(rules: Rules, liars: Sequence[int], lie: Lie) -> float:
    """How far liars move the estimate, in lengths of what it would have been."""
    plain = estimate(replace(rules, robust="none"))
    return float(np.linalg.norm(estimate(rules, liars, lie) - plain) / np.linalg.norm(plain))


BROKEN = {"1000 times": times(1000), "-1000 times": times(-1000), "flipped": times(-1)}


@pytest.mark.parametrize("liars", [[3], [0, 9]], ids=["one", "two"])
@pytest.mark.parametrize("lie", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(("rules", "most"), [(TRIM, 0.35), (CLIPPED, 1.1)], ids=["trim", "clip"])
def test_liars_cannot_move_the_estimate_far(rules: Rules, most: float, lie: Lie, liars: list[int]) -> None:
    assert moved(rules, liars, lie) < most


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("lie", [times_its_scale(1000), times_its_scale(0), flipped], ids=["large", "none", "flipped"])
@pytest.mark.parametrize(("rules", "most"), [(TRIM, 0.5), (CLIPPED, 1.1)], ids=["trim", "clip"])
def test_liars_of_few_bits_cannot_move_the_estimate_far(rules: Rules, most: float, lie: Lie, bits: int) -> None:
    assert moved(replace(rules, bits=bits), [0, 9], lie) < most
    assert moved(replace(SHARED, bits=bits), [3], times_its_scale(1000)) > 50


@pytest.mark.parametrize("liars", [[3], [0, 9]], ids=["one", "two"])
def test_without_a_rule_one_liar_decides(liars: list[int]) -> None:
    assert moved(SHARED, liars, times(1000)) > 50
    assert moved(SHARED, liars, many_samples) > 1.5


@pytest.mark.parametrize("liars", [[3], [0, 9]], ids=["one", "two"])
def test_trimming_is_not_fooled_by_a_made_up_number_of_samples(liars: list[int]) -> None:
    assert moved(TRIM, liars, many_samples) < 0.35


def test_clip_works_with_seeds_per_device_as_well() -> None:
    rules = replace(CLIPPED, seeds="per-device")
    assert moved(rules, [3], times(1000)) < 1.1
    assert moved(replace(rules, robust="none"), [3], times(1000)) > 50


@pytest.mark.parametrize("rules", [TRIM, CLIPPED], ids=["trim", "clip"])
def test_honest_rounds_are_hardly_changed(rules: Rules) -> None:
    assert moved(rules, [], times(1)) < 0.1


def test_liar_is_cut_when_an_honest_device_stays_away() -> None:
    differences = np.vstack([np.ones((8, 3)), np.full((1, 3), 1e6)])
    np.testing.assert_allclose(trimmed_mean(differences, np.ones(9), trim=0.1), 1.0)


@pytest.mark.parametrize(
    ("m", "trim", "kept"), [(10, 0.1, 8), (10, 0.3, 4), (9, 0.1, 7), (2, 0.4, 2), (1, 0.4, 1), (5, 0.0, 5)]
)
def test_trim_drops_its_share_at_either_end_but_never_all(m: int, trim: float, kept: int) -> None:
    differences = np.random.default_rng(m).permutation(np.arange(m, dtype=np.float64) ** 3)[:, None]
    cut = (m - kept) // 2
    expected = np.mean(np.sort(differences[:, 0])[cut : m - cut])
    np.testing.assert_allclose(trimmed_mean(differences, np.ones(m), trim), [expected])


def test_trim_is_the_weighted_mean_of_those_left_in_every_direction_by_itself() -> None:
    differences = np.array([[0.0, 9.0], [1.0, 3.0], [2.0, 1.0], [9.0, 0.0]])
    weights = np.array([0.2, 0.3, 0.2, 0.3])
    expected = [(0.3 * 1 + 0.2 * 2) / 0.5, (0.3 * 3 + 0.2 * 1) / 0.5]
    np.testing.assert_allclose(trimmed_mean(differences, weights, 0.25), expected)


def test_clip_leaves_what_is_not_large_to_the_bit() -> None:
    differences, even = np.array([[1.0, -2.0, 3.0], [-1.0, 2.0, 3.5]]), np.full(2, 0.5)
    np.testing.assert_array_equal(contained(differences, even), differences)
    # Of two devices, one liar: the other one sets the scale, whatever the weights.
    np.testing.assert_allclose(contained(np.array([[1.0], [-1e9]]), even), [[1.0], [-CLIP]])
    np.testing.assert_allclose(contained(np.array([[1.0], [-1.0]]), np.array([0.1, 0.9])), [[1.0], [-CLIP / 9]])


def test_liars_among_themselves_are_held_to_what_was_usual() -> None:
    assert contained(np.array([[1e9]]), np.ones(1), usual=1.0)[0, 0] == pytest.approx(CLIP * GROWTH)
    assert contained(np.array([[1e9]]), np.ones(1))[0, 0] == 1e9


samples_of_devices = st.lists(st.integers(1, 2**31), min_size=1, max_size=30)


@given(samples_of_devices, st.floats(0.01, 1))
def test_no_device_counts_for_more_than_its_share(samples: list[int], share: float) -> None:
    rules = replace(SHARED, max_share=share)
    counts = limited(samples, rules)
    most = max(share, 1 / len(samples))
    assert counts.max() <= most * counts.sum() * (1 + 1e-9)
    # Whoever is not above the limit counts in full, and nobody is cut without need.
    assert all(count in (n, counts.max()) for count, n in zip(counts, samples, strict=True))
    if max(samples) <= share * sum(samples):
        np.testing.assert_array_equal(counts, samples)


@given(samples_of_devices)
def test_with_a_robust_rule_none_counts_for_much_more_than_the_median_one(samples: list[int]) -> None:
    counts = limited(samples, CLIPPED)
    assert counts.max() <= SHARE * median(counts) * (1 + 1e-9)
    assert median(counts) == median(samples)


def test_statistics_of_a_liar_are_brought_back_to_the_others() -> None:
    rows = np.array([[1.0, 5.0], [1.1, 5.0], [0.9, 5.0], [1.2, 5.0], [1e30, -1e30]])
    np.testing.assert_array_equal(gathered(rows)[:4], rows[:4])
    np.testing.assert_allclose(gathered(rows)[4], [1.1 + 5 * 0.1, 5.0])


def test_devices_are_added_one_by_one_for_a_single_direction_as_for_many() -> None:
    column = np.random.default_rng(0).normal(size=(1000, 1))
    assert added(column)[0] == added(np.hstack([column, column]))[0] == np.cumsum(column)[-1]


def test_trim_needs_the_same_directions_on_every_device() -> None:
    assert TRIM.seeds == "shared"
    with pytest.raises(ForeseedError, match=r'"trim" compares devices along the same directions; set train\.seeds'):
        replace(TRIM, seeds="per-device")

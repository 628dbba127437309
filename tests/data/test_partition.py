import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.data import PartitionError, dirichlet, iid, k_classes

LABELS = np.random.default_rng(0).integers(0, 10, 5000).astype(np.uint8)

labels_and_devices = st.integers(1, 400).flatmap(
    lambda n: st.tuples(
        st.integers(1, 12).flatmap(lambda c: st.lists(st.integers(0, c - 1), min_size=n, max_size=n)),
        st.integers(1, n),
    )
)
seeds = st.integers(0, 2**64 - 1)
quick = settings(deadline=None)


def check(partition, labels, devices):
    """Every sample is on exactly one device, and the counts are those of the samples."""
    labels = np.asarray(labels)
    assert len(partition.indices) == devices
    assert np.array_equal(np.sort(np.concatenate(partition.indices)), np.arange(len(labels)))
    assert partition.sizes.tolist() == [len(indices) for indices in partition.indices]
    assert partition.class_counts.shape == (devices, labels.max() + 1)
    for indices, counts in zip(partition.indices, partition.class_counts, strict=True):
        assert np.array_equal(np.bincount(labels[indices], minlength=labels.max() + 1), counts)


@quick
@given(labels_and_devices, seeds)
def test_iid_uses_every_sample_once_and_evenly(given_labels, seed):
    labels, devices = given_labels
    partition = iid(labels, devices, seed)
    check(partition, labels, devices)
    assert partition.sizes.max() - partition.sizes.min() <= 1
    assert partition.moved == 0


@quick
@given(labels_and_devices, st.floats(1e-3, 1e3), seeds, st.data())
def test_dirichlet_uses_every_sample_once_and_keeps_the_minimum(given_labels, beta, seed, data):
    labels, devices = given_labels
    min_size = data.draw(st.integers(0, len(labels) // devices))
    partition = dirichlet(labels, devices, beta, seed, min_size)
    check(partition, labels, devices)
    assert partition.sizes.min() >= min_size


@quick
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12), seeds, st.data())
def test_k_classes_uses_every_sample_once_and_gives_exactly_k(devices, k, classes, seed, data):
    classes = max(k, min(classes, devices * k))
    holders = -(-devices * k // classes)
    counts = data.draw(st.lists(st.integers(holders, holders + 20), min_size=classes, max_size=classes))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), counts))
    partition = k_classes(labels, devices, k, seed)
    check(partition, labels, devices)
    assert ((partition.class_counts > 0).sum(axis=1) == k).all()
    held = (partition.class_counts > 0).sum(axis=0)
    assert held.max() - held.min() <= 1


@quick
@given(labels_and_devices, st.floats(1e-3, 1e3), seeds, st.data())
def test_the_minimum_is_taken_from_the_largest_and_counted(given_labels, beta, seed, data):
    labels, devices = given_labels
    min_size = data.draw(st.integers(0, len(labels) // devices))
    drawn = dirichlet(labels, devices, beta, seed, min_size=0)
    filled = dirichlet(labels, devices, beta, seed, min_size)
    assert drawn.moved == 0
    assert filled.moved == np.maximum(min_size - drawn.sizes, 0).sum()
    assert (filled.sizes[drawn.sizes < min_size] == min_size).all()
    gave = filled.sizes < drawn.sizes
    if gave.any():
        assert filled.sizes[gave].max() - filled.sizes[gave].min() <= 1
        assert filled.sizes.max() <= filled.sizes[gave].min() + 1
    untouched = (drawn.sizes >= min_size) & ~gave
    assert np.array_equal(drawn.class_counts[untouched], filled.class_counts[untouched])


@pytest.mark.parametrize(
    "make",
    [lambda s: iid(LABELS, 20, s), lambda s: dirichlet(LABELS, 20, 0.3, s), lambda s: k_classes(LABELS, 20, 3, s)],
)
def test_equal_seeds_give_equal_partitions_and_others_do_not(make):
    first, same, other = make(1), make(1), make(2)
    assert all(np.array_equal(a, b) for a, b in zip(first.indices, same.indices, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))


def test_partitions_are_the_same_on_every_machine():
    labels = np.arange(12) % 3
    assert [i.tolist() for i in iid(labels, 3, 5).indices] == [[0, 9, 10, 2], [5, 11, 8, 4], [6, 7, 1, 3]]
    assert [i.tolist() for i in dirichlet(labels, 3, 0.5, 5).indices] == [[2, 5], [8, 0, 4, 1], [6, 10, 9, 7, 11, 3]]
    assert [i.tolist() for i in k_classes(labels, 3, 2, 5).indices] == [[11, 2, 9, 0], [5, 8, 1, 10], [7, 4, 3, 6]]


def test_dirichlet_shares_have_the_spread_of_the_distribution():
    """E[sum of squared shares] of Dir(beta) over d devices is (beta + 1) / (d beta + 1)."""
    one_class = np.zeros(10_000, int)
    for beta in (0.1, 0.5, 5.0):
        shares = np.stack([dirichlet(one_class, 10, beta, seed, 0).sizes / 10_000 for seed in range(400)])
        assert (shares**2).sum(axis=1).mean() == pytest.approx((beta + 1) / (10 * beta + 1), rel=0.06)
        assert shares.mean(axis=0) == pytest.approx(np.full(10, 0.1), abs=0.06)


def test_a_smaller_beta_makes_devices_differ_more():
    held = [(dirichlet(LABELS, 50, beta, 1).class_counts > 0).sum(axis=1).mean() for beta in (0.01, 0.1, 1, 100)]
    assert held == sorted(held)
    assert held[0] < 2.5
    assert held[-1] == 10


def test_classes_are_drawn_independently():
    shares = np.stack([dirichlet(np.arange(2000) % 2, 2, 1.0, seed, 0).class_counts[0] / 1000 for seed in range(300)])
    assert abs(np.corrcoef(shares.T)[0, 1]) < 0.2


def test_rounding_favours_no_device_when_samples_are_fewer_than_devices():
    labels = np.repeat(np.arange(10), 50)
    holding = [(dirichlet(labels, 400, 1e6, seed, min_size=0).sizes > 0).mean() for seed in range(20)]
    # Each of ten classes falls on one of eight neighbours: a device stays empty with (7/8)^10. Of twenty such shares
    # the mean lies within 0.02 (three standard errors); favoured devices would leave seven eighths empty.
    assert np.mean(holding) == pytest.approx(1 - (7 / 8) ** 10, abs=3 * np.std(holding) / np.sqrt(20))


def test_samples_stand_in_random_order_within_a_device():
    labels = np.repeat(np.arange(2), 500)
    for partition in (iid(labels, 2, 1), dirichlet(labels, 2, 100, 1), k_classes(labels, 2, 2, 1)):
        for indices in partition.indices:
            first_half = labels[indices[: len(indices) // 2]]
            assert 0.35 < first_half.mean() < 0.65


def test_k_classes_shares_every_class_evenly():
    partition = k_classes(np.arange(6000) % 10, 30, 2, 1)
    held = partition.class_counts > 0
    assert (held.sum(axis=0) == 6).all()
    assert (partition.class_counts[held] == 100).all()
    assert len({tuple(np.flatnonzero(row)) for row in held}) > 10


def test_k_classes_skips_numbers_without_samples():
    partition = k_classes(np.array([0, 0, 7, 7, 9, 9]), 3, 2, 1)
    assert ((partition.class_counts > 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize("beta", [1e-12, 1e-5, 1e6, 1e12])
def test_extreme_betas_still_share_everything_out(beta):
    check(dirichlet(LABELS, 100, beta, 1), LABELS, 100)


@pytest.mark.parametrize("beta", [0, -0.1, float("nan"), float("inf")])
def test_beta_must_be_above_zero(beta):
    with pytest.raises(PartitionError, match=r"beta = .*expected a number above 0"):
        dirichlet(LABELS, 10, beta, 1)


@pytest.mark.parametrize(
    "make", [lambda y, d: iid(y, d, 1), lambda y, d: dirichlet(y, d, 0.1, 1), lambda y, d: k_classes(y, d, 1, 1)]
)
def test_devices_and_labels_must_make_sense(make):
    for devices in (0, -1, 5001):
        with pytest.raises(PartitionError, match=f"{devices} devices for 5000 samples: expected 1 to 5000 devices"):
            make(LABELS, devices)
    for labels in ([[0, 1]], [0.5, 1.0], [0, -1], ["cat"]):
        with pytest.raises(PartitionError, match="expected one integer from 0 up"):
            make(labels, 1)
    with pytest.raises(PartitionError, match="devices for 0 samples"):
        make(np.array([], int), 1)


def test_a_negative_seed_is_refused():
    with pytest.raises(PartitionError, match="seed = -1"):
        iid(LABELS, 10, -1)


@pytest.mark.parametrize("min_size", [-1, 51])
def test_a_minimum_that_cannot_be_kept_is_refused(min_size):
    with pytest.raises(PartitionError, match=f"min_size = {min_size} on 100 devices: expected 0 to 50"):
        dirichlet(LABELS, 100, 0.1, 1, min_size)


def test_the_largest_possible_minimum_is_kept():
    assert (dirichlet(LABELS, 100, 0.1, 1, 50).sizes == 50).all()


@pytest.mark.parametrize("k", [0, -1, 11])
def test_k_must_lie_within_the_classes(k):
    with pytest.raises(PartitionError, match=f"k = {k} classes a device: expected 1 to 10"):
        k_classes(LABELS, 20, k, 1)


def test_too_few_devices_to_hold_all_classes_are_refused():
    with pytest.raises(PartitionError, match="4 devices of 2 classes each cannot hold all 10"):
        k_classes(LABELS, 4, 2, 1)


def test_a_class_too_small_for_its_devices_is_named():
    labels = np.array([0] * 100 + [3] * 2)
    with pytest.raises(PartitionError, match="class 3 has 2 samples for 5 devices"):
        k_classes(labels, 5, 2, 1)


def test_a_hundred_thousand_devices_are_no_trouble():
    devices = 100_000
    labels = np.random.default_rng(1).integers(0, 10, 300_000)
    for partition in (iid(labels, devices, 1), dirichlet(labels, devices, 0.1, 1), k_classes(labels, devices, 2, 1)):
        assert len(partition.indices) == devices
        assert partition.sizes.min() >= 1
        assert partition.sizes.sum() == 300_000
        assert np.array_equal(partition.class_counts.sum(axis=0), np.bincount(labels))

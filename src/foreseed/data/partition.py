"""Sharing the samples of a data set out over devices; every sample goes to exactly one device.

All randomness comes from `Draws` of the given seed, so equal arguments give equal partitions on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from foreseed.data.errors import PartitionError
from foreseed.draws import Draws

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each device holds."""

    indices: tuple[Integers, ...]
    """The samples of each device, in random order, so that any run of them is a fair part of the device's data."""
    sizes: Integers
    class_counts: Integers
    """Samples by device and class, [devices, classes]."""
    moved: int = 0
    """Samples that went to another device than the one drawn, so that every device has its minimum."""


def iid(labels: npt.ArrayLike, devices: int, seed: int) -> Partition:
    """Deal the samples out at random; sizes differ by one at most."""
    flat, rng = _checked(labels, devices, seed)
    owner = np.empty(len(flat), np.int64)
    owner[rng.permutation(len(flat))] = np.arange(len(flat)) % devices
    return _partition(owner, flat, devices, rng)


def dirichlet(labels: npt.ArrayLike, devices: int, beta: float, seed: int, min_size: int = 1) -> Partition:
    """Give every class its own shares over the devices, drawn from Dir(beta); a small beta makes devices differ more.

    With a small beta many devices would end up empty. Devices below `min_size` are filled up to it with samples
    drawn at random from the largest devices, which are cut down to a common size; `moved` counts these samples.
    """
    flat, rng = _checked(labels, devices, seed)
    if not (isfinite(beta) and beta > 0):
        raise PartitionError(f"beta = {beta}: expected a number above 0; 0.1 is very uneven, 100 nearly even")
    if min_size < 0 or devices * min_size > len(flat):
        raise PartitionError(
            f"min_size = {min_size} on {devices} devices: expected 0 to {len(flat) // devices}, "
            f"as there are {len(flat)} samples"
        )
    owner = np.empty(len(flat), np.int64)
    for members in _by_class(flat, rng):
        shares = np.cumsum(rng.dirichlet(beta, devices))
        if not isfinite(shares[-1]):
            raise PartitionError(f"beta = {beta} is too extreme to draw from; expected about 0.001 to 1,000,000")
        # The samples lie evenly along the shares. The random start matters when samples are fewer than devices:
        # without it rounding would give the same few devices the samples of every class.
        spots = (np.arange(len(members)) + rng.uniforms(1)) * (shares[-1] / len(members))
        owner[members] = np.minimum(np.searchsorted(shares, spots, side="right"), devices - 1)
    moved = _fill_up(owner, devices, min_size, rng)
    return _partition(owner, flat, devices, rng, moved)


def k_classes(labels: npt.ArrayLike, devices: int, k: int, seed: int) -> Partition:
    """Give every device samples of exactly k classes; each class is shared evenly by the devices that hold it."""
    flat, rng = _checked(labels, devices, seed)
    members = list(_by_class(flat, rng))
    if not 1 <= k <= len(members):
        raise PartitionError(f"k = {k} classes a device: expected 1 to {len(members)}, the classes that have samples")
    if devices * k < len(members):
        raise PartitionError(
            f"{devices} devices of {k} classes each cannot hold all {len(members)}; use more devices or a larger k"
        )
    holder = np.repeat(np.arange(devices), k)
    held = np.array(_deal_classes(devices, k, len(members), rng))
    owner = np.empty(len(flat), np.int64)
    for c, samples in enumerate(members):
        holders = holder[held == c]
        holders = holders[rng.permutation(len(holders))]
        if len(holders) > len(samples):
            raise PartitionError(
                f"class {flat[samples[0]]} has {len(samples)} samples for {len(holders)} devices that would hold it; "
                "use fewer devices or a smaller k"
            )
        owner[samples] = holders[np.arange(len(samples)) % len(holders)]
    return _partition(owner, flat, devices, rng)


def _checked(labels: npt.ArrayLike, devices: int, seed: int) -> tuple[Integers, Draws]:
    """The labels as integers and the generator, once the arguments that all partitions share make sense."""
    given = np.asarray(labels)
    if given.ndim != 1 or given.dtype.kind not in "iu" or (len(given) and given.min() < 0):
        raise PartitionError(
            f"labels of type {given.dtype} and shape {given.shape}: expected one integer from 0 up for each sample"
        )
    if not 1 <= devices <= len(given):
        raise PartitionError(f"{devices} devices for {len(given)} samples: expected 1 to {len(given)} devices")
    if seed < 0:
        raise PartitionError(f"seed = {seed}: expected 0 or a positive integer")
    return given.astype(np.int64), Draws(seed, "partition")


def _by_class(labels: Integers, rng: Draws) -> Iterator[Integers]:
    """The samples of each class that has any, in random order."""
    order = np.lexsort((rng.words(len(labels)), labels))
    yield from np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _deal_classes(devices: int, k: int, classes: int, rng: Draws) -> list[int]:
    """Deal k different classes to each device, from shuffled packs of all classes: each is held equally often."""
    dealt: list[int] = []
    pack: list[int] = []
    for _ in range(devices):
        hand, pack = pack[:k], pack[k:]
        if len(hand) < k:
            fresh = [int(c) for c in rng.permutation(classes)]
            # Classes that the device has already wait for the next one.
            fresh.sort(key=hand.__contains__)
            take = k - len(hand)
            hand, pack = hand + fresh[:take], fresh[take:]
        dealt += hand
    return dealt


def _fill_up(owner: Integers, devices: int, min_size: int, rng: Draws) -> int:
    """Move samples from the largest devices to those below the minimum, in place; returns how many."""
    sizes = np.bincount(owner, minlength=devices)
    lacking = np.maximum(min_size - sizes, 0)
    need = int(lacking.sum())
    if not need:
        return 0
    # The highest common size to which cutting the largest devices down frees enough samples.
    low, high = min_size, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= need else (low, middle - 1)
    giving = np.maximum(sizes - low, 0)
    giving[np.flatnonzero(giving)[: int(giving.sum()) - need]] -= 1
    order = np.lexsort((rng.words(len(owner)), owner))
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    freed = order[rank < np.repeat(giving, sizes)]
    owner[freed[rng.permutation(len(freed))]] = np.repeat(np.arange(devices), lacking)
    return need


def _partition(owner: Integers, labels: Integers, devices: int, rng: Draws, moved: int = 0) -> Partition:
    """A partition from the device that owns each sample."""
    classes = int(labels.max()) + 1
    counts = np.bincount(owner * classes + labels, minlength=devices * classes).reshape(devices, classes)
    sizes = counts.sum(axis=1)
    order = np.lexsort((rng.words(len(owner)), owner))
    return Partition(tuple(np.split(order, np.cumsum(sizes)[:-1])), sizes, counts, moved)

"""Aggregation that a few lying or broken devices cannot decide.

A device has no more to lie with than its loss differences and its number of samples, so this is where to look.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import ceil, fsum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CLIP = 5.0
"""Times the median: Gaussian slopes reach it once in 1,350 directions, so honest devices hardly feel it."""
SHARE = 2.0
"""Times the median: nobody can check how many samples a device has, so none counts for much more than the others."""


def fair(weights: Array) -> Array:
    """The weights, none larger than SHARE times the median one, scaled to add up to 1."""
    limited = np.minimum(weights, SHARE * _median(weights))
    shares: Array = limited / fsum(limited)
    return shares


def clipped(differences: Array) -> Array:
    """Loss differences [device, direction], none larger than CLIP times the median size of the round."""
    limit = CLIP * _median(np.abs(differences))
    return np.clip(differences, -limit, limit)


def trimmed_mean(differences: Array, weights: Array, trim: float) -> Array:
    """The weighted mean over devices of each direction, without its `trim` smallest and largest share of devices.

    Rounded up to whole devices: if one of ten stays away, one of the nine is still cut at either end.
    """
    m = len(weights)
    cut = min(ceil(round(trim * m, 6)), (m - 1) // 2)
    ranks = np.argsort(np.argsort(differences, axis=0, kind="stable"), axis=0, kind="stable")
    kept = np.where((ranks >= cut) & (ranks < m - cut), fair(weights)[:, None], 0.0)
    mean: Array = added(kept * differences) / added(kept)
    return mean


def added(rows: Iterable[Array]) -> Array:
    """The rows added up one after the other."""
    # np.sum does so too, but for rows of a single number, which it adds in an order of its own.
    return reduce(np.add, rows)


def _median(sizes: Array) -> float:
    # The lower one of two, not their mean, which one liar among two devices would decide.
    return float(np.quantile(sizes, 0.5, method="lower"))

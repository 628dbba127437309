"""Aggregation that a few lying or broken devices cannot decide.

A device has no more to lie with than its loss differences and its number of samples, so this is where to look.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CLIP = 5.0
"""Times the median: Gaussian slopes reach it once in 1,350 directions, so honest devices hardly feel it."""


def clipped(differences: Array) -> Array:
    """Loss differences [device, direction], none larger than CLIP times the median size of the round."""
    limit = CLIP * float(np.median(np.abs(differences)))
    return np.clip(differences, -limit, limit)


def trimmed_mean(differences: Array, weights: Array, trim: float) -> Array:
    """The weighted mean over devices of each direction, without its `trim` smallest and largest share of devices."""
    m = len(weights)
    cut = min(int(trim * m), (m - 1) // 2)
    ranks = np.argsort(np.argsort(differences, axis=0, kind="stable"), axis=0, kind="stable")
    kept = np.where((ranks >= cut) & (ranks < m - cut), weights[:, None], 0.0)
    mean: Array = (kept * differences).sum(axis=0) / kept.sum(axis=0)
    return mean

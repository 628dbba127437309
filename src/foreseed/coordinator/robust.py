"""Aggregation that a few lying or broken devices cannot decide.

A device has no more to lie with than its loss differences, its number of samples and the statistics of its batch
norms, so this is where to look. What cannot be true at all is refused before it comes here (`plausible.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, fsum
from typing import TYPE_CHECKING

import numpy as np

from foreseed.coordinator.sums import Doubles, added, squares

if TYPE_CHECKING:
    from foreseed.coordinator.coordinator import Rules

CLIP = 1.5
"""Times the median part: some four of five parts of honest devices are shorter; the longest seen was eight times it."""
SHARE = 1.5
"""Times the median: nobody can check how many samples a device has, so none counts for much more than the others."""
GROWTH = 4.0
"""Times what was usual in the last rounds: a round of few devices, all liars, is still held to that."""
STRAY = 5.0
"""Times the median distance from the median, for a batch norm's statistics."""


def limited(samples: Sequence[int], rules: Rules) -> Doubles:
    """How many samples of each device count.

    None has more than `max_share` of them all, or, where devices are so few that somebody must, than any other. With a
    robust rule none has more than SHARE times the median either.
    """
    counts = np.array(samples, np.float64)
    if rules.robust != "none":
        counts = np.minimum(counts, SHARE * median(counts))
    share = max(rules.max_share, 1 / len(counts))
    ordered = np.sort(counts)[::-1]
    for above in range(len(ordered)):
        # The largest so many have all the same, which is their share of what it comes to together with the others.
        most = share * fsum(ordered[above:]) / (1 - above * share)
        if ordered[above] <= most:
            break
    return np.minimum(counts, most)


def contained(differences: Doubles, weights: Doubles, usual: float = 0.0) -> Doubles:
    """Loss differences [device, direction], shortened where a device would move the round by much more than others.

    A device moves it by its weight times the size of its differences: at most CLIP times the median device's, which in
    turn counts for GROWTH times the `usual` size at most (0: nothing is known of it).
    """
    parts = weights * sizes(differences)
    middle = median(parts)
    if usual:
        middle = min(middle, GROWTH * usual / len(parts))
    factors = np.minimum(1.0, CLIP * middle / np.where(parts > 0, parts, 1.0))
    shortened: Doubles = factors[:, None] * differences
    return shortened


def trimmed_mean(differences: Doubles, weights: Doubles, trim: float) -> Doubles:
    """The weighted mean over devices of each direction, without its `trim` smallest and largest share of devices.

    Rounded up to whole devices: if one of ten stays away, one of the nine is still cut at either end.
    """
    m = len(weights)
    cut = min(ceil(round(trim * m, 6)), (m - 1) // 2)
    ranks = np.argsort(np.argsort(differences, axis=0, kind="stable"), axis=0, kind="stable")
    kept = np.where((ranks >= cut) & (ranks < m - cut), weights[:, None], 0.0)
    mean: Doubles = added(kept * differences) / added(kept)
    return mean


def gathered(rows: Doubles) -> Doubles:
    """Statistics [device, number], none further than STRAY times the median distance from the median."""
    middle = np.quantile(rows, 0.5, axis=0, method="lower")
    reach = STRAY * np.quantile(np.abs(rows - middle), 0.5, axis=0, method="higher")
    return np.clip(rows, middle - reach, middle + reach)


def sizes(differences: Doubles) -> Doubles:
    """The root mean squares of devices' differences [device, direction], the same everywhere."""
    found: Doubles = np.sqrt(squares(differences) / differences.shape[1])
    return found


def median(sizes: Sequence[float] | Doubles) -> float:
    """The lower one of two, not their mean, which one liar among two devices would decide."""
    return float(np.sort(np.asarray(sizes, np.float64))[(len(sizes) - 1) // 2])

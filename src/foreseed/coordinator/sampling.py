"""Which devices take part in a round: one rule for every method, so that arms of a comparison ask the same ones."""

from __future__ import annotations

import numpy.typing as npt

from foreseed.draws import Draws


def sample(seed: int, round: int, pool: npt.ArrayLike, per_round: int) -> list[int]:
    """`per_round` of the pool's devices (all, if they are fewer), without replacement, in ascending order."""
    return Draws(seed, "sample", round).choose(pool, per_round)

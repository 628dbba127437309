"""Which devices take part in a round: one rule for every method, so that arms of a comparison ask the same ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def sample(seed: int, round: int, pool: npt.ArrayLike, per_round: int) -> list[int]:
    """`per_round` of the pool's devices (all, if they are fewer), without replacement, in ascending order."""
    devices = np.unique(pool)
    rng = np.random.default_rng([seed & 0xFFFFFFFF, seed >> 32, round])
    return sorted(int(device) for device in rng.choice(devices, min(per_round, len(devices)), replace=False))

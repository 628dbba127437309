"""Means that methods share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


def moving_average(average: Vector | None, values: Vector, decay: float) -> Vector | None:
    """One step of the values' moving average; None stays None."""
    if average is None:
        return None
    keep = np.float32(decay)
    return keep * average + (1 - keep) * values

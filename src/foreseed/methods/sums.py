"""Sums of products, added one after the other: NumPy's own have an order by the machine, and rates follow from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


def dot(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    """The product of two vectors."""
    products = a.astype(np.float64) * b
    return float(np.add.accumulate(products)[-1]) if len(products) else 0.0


def square(a: npt.NDArray[np.floating]) -> float:
    """The squared length of a vector."""
    return dot(a, a)


def dots(a: Doubles, b: Doubles, sizes: npt.NDArray[np.int64]) -> Doubles:
    """The products of two vectors' pieces, of these sizes."""
    # From differences of one running sum: a piece of 10 after one of 5,000 still has ten digits.
    sums = np.add.accumulate(a * b)[np.cumsum(sizes) - 1]
    return np.diff(sums, prepend=0.0)

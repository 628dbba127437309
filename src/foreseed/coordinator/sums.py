"""Sums in an order that is the same everywhere: NumPy's own have one by the machine, and runs follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_ROW = 128


def added(rows: Iterable[Doubles]) -> Doubles:
    """The rows added up one after the other."""
    # np.sum does so too, but for rows of a single number, which it adds in an order of its own.
    return reduce(np.add, rows)


def dot(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    """The product of two vectors."""
    products = np.multiply(a, b, dtype=np.float64)
    # Rows are added one after the other, many numbers at a time; then what that comes to, and what is left, in order.
    rows = products[: len(products) // _ROW * _ROW].reshape(-1, _ROW)
    return float(np.add.accumulate(np.concatenate([[0.0], rows.sum(axis=0), products[rows.size :]]))[-1])


def square(a: npt.NDArray[np.floating]) -> float:
    """The squared length of a vector."""
    return dot(a, a)


def dots(a: Doubles, b: Doubles, sizes: npt.NDArray[np.int64]) -> Doubles:
    """The products of two vectors' pieces, of these sizes."""
    # From differences of one running sum: a piece of 10 after one of 5,000 still has ten digits.
    sums = np.add.accumulate(a * b)[np.cumsum(sizes) - 1]
    return np.diff(sums, prepend=0.0)

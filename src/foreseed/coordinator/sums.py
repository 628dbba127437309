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


def square(vector: npt.NDArray[np.floating]) -> float:
    """The squared length of a vector."""
    return float(squares(vector[None])[0])


def squares(vectors: npt.NDArray[np.floating]) -> Doubles:
    """The squared lengths of a matrix's rows."""
    products = np.multiply(vectors, vectors, dtype=np.float64)
    # Runs of numbers are added one after the other; then what that comes to, and what is left, in order.
    count = products.shape[1] // _ROW
    runs, rest = products[:, : count * _ROW].reshape(len(products), count, _ROW), products[:, count * _ROW :]
    return np.add.accumulate(np.concatenate([runs.sum(axis=1), rest], axis=1), axis=1)[:, -1]


def dots(a: Doubles, b: Doubles, sizes: npt.NDArray[np.int64]) -> Doubles:
    """The products of two vectors' pieces, of these sizes."""
    # From differences of one running sum: a piece of 10 after one of 5,000 still has ten digits.
    sums = np.add.accumulate(a * b)[np.cumsum(sizes) - 1]
    return np.diff(sums, prepend=0.0)

"""What each layer computes, in NumPy: a function for each entry of the table in `ops`, named there.

Each takes its op, what the op has of its own, and the tensors that it reads: batches of maps in float32.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from foreseed.engine.ops import Op, Pool, Window
from foreseed.engine.reference_rng import Floats

Doubles = NDArray[np.float64]


class Own(NamedTuple):
    """What an op has of its own."""

    values: Floats
    live: slice | NDArray[np.uint32]
    """Which weights its first values are."""
    stats: Doubles
    """Its statistics: to be used if they are frozen, to be written otherwise."""
    frozen: bool


def conv(op: Op, own: Own, x: Floats) -> Floats:
    """Every window times the dense weights of its group, in float64; rounded once, at the end."""
    kh, kw, sh, sw, ph, pw = op.window
    weights = np.zeros((op.channels, x.shape[1] // op.groups, kh, kw))
    weights.ravel()[own.live] = own.values[: op.n_weights]
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = sliding_window_view(padded, (kh, kw), axis=(2, 3))[:, :, ::sh, ::sw]
    parts = [
        np.tensordot(windows_of_group, weights_of_group, axes=((1, 4, 5), (1, 2, 3)))
        for windows_of_group, weights_of_group in zip(
            np.split(windows, op.groups, axis=1), np.split(weights, op.groups), strict=True
        )
    ]
    result = np.concatenate(parts, axis=-1)
    if op.has_parameters:
        result += own.values[op.n_weights :]
    return np.ascontiguousarray(result.transpose(0, 3, 1, 2), np.float32)


def norm(op: Op, own: Own, x: Floats) -> Floats:
    """By the moments of each image's groups, or of the batch's channels, or by frozen ones."""
    if op.groups:
        n, c = x.shape[:2]
        of_groups = _moments(x.reshape(n, op.groups, -1), (2,))
        mean, variance = (moment.repeat(c // op.groups, axis=1) for moment in of_groups)
    else:
        if not own.frozen:
            own.stats[:] = np.concatenate(_moments(x, (0, 2, 3)))
        mean, variance = np.split(own.stats, 2)
    gamma, beta = np.split(own.values, 2) if op.has_parameters else (np.float32(1), np.float32(0))
    a = gamma / np.sqrt(variance + op.eps)
    b = beta - mean * a
    return x * a.astype(np.float32)[..., None, None] + b.astype(np.float32)[..., None, None]


def _moments(x: Floats, axes: tuple[int, ...]) -> tuple[Doubles, Doubles]:
    """Mean and biased variance over some axes, from sums in float64."""
    count = prod(x.shape[axis] for axis in axes)
    mean = x.sum(axis=axes, dtype=np.float64) / count
    square = np.square(x, dtype=np.float64).sum(axis=axes) / count
    return mean, np.maximum(square - mean * mean, 0)


def add(op: Op, own: Own, x: Floats, y: Floats) -> Floats:
    return x + y


def relu(op: Op, own: Own, x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))


def hardswish(op: Op, own: Own, x: Floats) -> Floats:
    gate: Floats = np.clip(x + np.float32(3), np.float32(0), np.float32(6))
    return x * gate * np.float32(1 / 6)


def max_pool(op: Op, own: Own, x: Floats) -> Floats:
    highest: Floats = _windows(x, op.pool_window, outside=-np.inf).max(axis=(-2, -1))
    return highest


def average_pool(op: Op, own: Own, x: Floats) -> Floats:
    ones = np.ones((1, 1, *x.shape[2:]), np.float32)
    count = _sums(_windows(ones, op.pool_window, outside=op.pool is Pool.AVERAGE))
    return _sums(_windows(x, op.pool_window, outside=0)) * (np.float32(1) / count)


def _windows(x: Floats, window: Window, outside: float) -> Floats:
    kh, kw, sh, sw, ph, pw = window
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=outside)
    return sliding_window_view(padded, (kh, kw), axis=(2, 3))[:, :, ::sh, ::sw]


def _sums(windows: Floats) -> Floats:
    # In row order: np.sum would choose an order of its own, and float32 sums depend on it.
    total = np.zeros(windows.shape[:-2], np.float32)
    for i, j in np.ndindex(windows.shape[-2:]):
        total += windows[..., i, j]
    return total

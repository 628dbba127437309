"""What each layer computes, in NumPy: a function for each entry of the table in `ops`, named there.

Each takes its op, what the op has of its own, and the tensors that it reads: batches of maps in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from foreseed.engine.ops import Op, Pool
from foreseed.engine.parts import POOLS, reach
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
    (dh, dw), window = op.dilation, reach(op)
    windows = sliding_window_view(padded, window, axis=(2, 3))[:, :, ::sh, ::sw, ::dh, ::dw]
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


def mul(op: Op, own: Own, x: Floats, y: Floats) -> Floats:
    return x * y


def cat(op: Op, own: Own, x: Floats, y: Floats) -> Floats:
    return np.concatenate((x, y), axis=1)


def pad(op: Op, own: Own, x: Floats) -> Floats:
    top, left, bottom, right = op.window[:4]
    return np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))


def relu(op: Op, own: Own, x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))


def hardswish(op: Op, own: Own, x: Floats) -> Floats:
    gate: Floats = np.clip(x + np.float32(3), np.float32(0), np.float32(6))
    return x * gate * np.float32(1 / 6)


def relu6(op: Op, own: Own, x: Floats) -> Floats:
    return _clipped(x)


def hardsigmoid(op: Op, own: Own, x: Floats) -> Floats:
    return _clipped(x + np.float32(3)) * np.float32(1 / 6)


def _clipped(x: Floats) -> Floats:
    rising = np.where(x < 0, np.float32(0), x)
    clipped: Floats = np.where(rising > 6, np.float32(6), rising)
    return clipped


def leaky_relu(op: Op, own: Own, x: Floats) -> Floats:
    bent: Floats = np.where(x < 0, np.float32(op.slope) * x, x)
    return bent


def sigmoid(op: Op, own: Own, x: Floats) -> Floats:
    power, _ = _exponential(-np.abs(x))
    share: Floats = np.where(x < 0, power, np.float32(1)) / (np.float32(1) + power)
    return share


def silu(op: Op, own: Own, x: Floats) -> Floats:
    return x * sigmoid(op, own, x)


def tanh(op: Op, own: Own, x: Floats) -> Floats:
    _, less_one = _exponential(np.float32(-2) * np.abs(x))
    quotient: Floats = np.where(x < 0, less_one, -less_one) / (np.float32(2) + less_one)
    return quotient


def gelu_tanh(op: Op, own: Own, x: Floats) -> Floats:
    inside = (x + np.float32(0.044715) * x * x * x) * np.float32(1.59576912)
    return x * sigmoid(op, own, inside)


def gelu(op: Op, own: Own, x: Floats) -> Floats:
    """x times the normal distribution, whose tail is e^(-x^2 / 2) times a polynomial in t = 1 / (1 + 0.23 |x|)."""
    power, _ = _exponential(np.float32(-0.5) * x * x)
    t = np.float32(1) / (np.float32(1) + np.float32(0.231641888) * np.abs(x))
    tail = power * (t * _polynomial(t, _NORMAL_TAIL))
    return x * np.where(x < 0, tail, np.float32(1) - tail)


_NORMAL_TAIL = (
    -0.0708308485, 0.24943752, -0.204797129, 0.228278309, 0.0118596251, 0.103198459, 0.0903250837, 0.0925290358,
)  # fmt: skip
_EXPONENTIAL = (0.0013950603, 0.0083689534, 0.041666204, 0.16666518, 0.5)


def _exponential(t: Floats) -> tuple[Floats, Floats]:
    """e^t and e^t - 1 of t <= 0, step by step as `docs/format.md` has it."""
    t = np.where(t < -87, np.float32(-87), t)
    shifted = t * np.float32(1.44269504) + np.float32(12582912)
    n = shifted - np.float32(12582912)
    r = (t - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    q = r + r * r * _polynomial(r, _EXPONENTIAL)
    scale = ((shifted.view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32)
    return scale * q + scale, scale * q + (scale - np.float32(1))


def _polynomial(x: Floats, coefficients: Sequence[float]) -> Floats:
    """By Horner's rule, the highest power first."""
    first, *others = map(np.float32, coefficients)
    value: Floats = np.full_like(x, first)
    for coefficient in others:
        value = value * x + coefficient
    return value


def max_pool(op: Op, own: Own, x: Floats) -> Floats:
    highest: Floats = _windows(x, op, outside=-np.inf, beyond=-np.inf).max(axis=(-2, -1))
    return highest


def average_pool(op: Op, own: Own, x: Floats) -> Floats:
    ones = np.ones((1, 1, *x.shape[2:]), np.float32)
    count = _sums(_windows(ones, op, outside=op.pool is Pool.AVERAGE))
    return _sums(_windows(x, op)) * (np.float32(1) / count)


def adaptive_pool(op: Op, own: Own, x: Floats) -> Floats:
    """The mean of each of rows x columns windows that share the map, ends rounded outwards."""
    rows, columns = (
        [slice(i * size // n, -(-(i + 1) * size // n)) for i in range(n)]
        for n, size in zip(op.pool_window, x.shape[2:], strict=False)
    )
    means = [[_sums(x[:, :, ys, xs]) * (np.float32(1) / np.float32(_area(ys, xs))) for xs in columns] for ys in rows]
    return np.stack([np.stack(row, axis=-1) for row in means], axis=-2)


def _area(ys: slice, xs: slice) -> int:
    return int((ys.stop - ys.start) * (xs.stop - xs.start))


def _windows(x: Floats, op: Op, outside: float = 0, beyond: float = 0) -> Floats:
    """The windows of a pool; `outside` is its padding, `beyond` what ceil mode adds after that."""
    kh, kw, sh, sw, ph, pw = op.pool_window
    _, rows, columns = POOLS[op.pool].shape(op, x.shape[1:])
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=outside)
    more = [
        max(0, (n - 1) * s + k - size)
        for n, s, k, size in zip((rows, columns), (sh, sw), (kh, kw), padded.shape[2:], strict=True)
    ]
    padded = np.pad(padded, ((0, 0), (0, 0), (0, more[0]), (0, more[1])), constant_values=beyond)
    return sliding_window_view(padded, (kh, kw), axis=(2, 3))[:, :, ::sh, ::sw]


def _sums(windows: Floats) -> Floats:
    # In row order: np.sum would choose an order of its own, and float32 sums depend on it.
    total = np.zeros(windows.shape[:-2], np.float32)
    for i, j in np.ndindex(windows.shape[-2:]):
        total += windows[..., i, j]
    return total

"""What theory says of an estimate of K directions: its error, and its cosine with the gradient (docs/theory.md)."""

from __future__ import annotations

from math import pi, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from foreseed.coordinator.sums import Doubles
from foreseed.engine.types import DirectionKind

Integers = npt.NDArray[np.int64]


class Law(NamedTuple):
    """Of an estimate, on average over directions."""

    error: float
    """Its squared distance from the gradient, over the gradient's squared length."""
    cosine: float


def law(parts: Doubles, gradient: Doubles, k: int, bits: int, kind: DirectionKind) -> Law:
    """What to expect of k directions, each with the slope of one of the parts' gradients [part, n] in turn."""
    n = parts.shape[1]
    counts: Integers = np.array([len(range(part, k, len(parts))) for part in range(len(parts))])
    shares, squares = counts / k, (parts**2).sum(1)
    if bits == 1:
        # Every part's gradient counts with the mean length of all: one scale serves them.
        length = float(shares @ np.sqrt(squares))
        mean = length * ((shares / np.sqrt(squares)) @ parts)
        variance = (pi / 2 * n - 1) / k * length**2
    else:
        mean = shares @ parts
        fourth_moment = 1 if kind == "gaussian" else -1
        variance = (n + fourth_moment) / k * float(shares @ squares)
        if bits < 32:
            # Rounding at random to levels a step apart has the variance step^2 / 6.
            step = 2 / (2**bits - 1)
            variance += n / k * step**2 / 6 * _largest_square(squares, counts)
    truth = float(gradient @ gradient)
    error = float(((mean - gradient) ** 2).sum()) + variance
    cosine = float(mean @ gradient) / sqrt(truth * (float(mean @ mean) + variance))
    return Law(error / truth, cosine)


def noise_scale(images: Doubles) -> float:
    """rho: the variance of a mean of so many images' gradients [image, n], over the squared length of that mean."""
    count, mean = len(images), images.mean(0)
    return float(((images - mean) ** 2).sum() / (count - 1) / count / (mean @ mean))


def _largest_square(squares: Doubles, counts: Integers) -> float:
    """The mean of the largest squared slope, where a part's slopes are normal with the square of its gradient."""
    top = 60 * float(squares.max())  # a chance of 1e-14 to lie above
    t = torch.linspace(0, top, 20_000, dtype=torch.float64)
    below = torch.zeros_like(t)
    for square, count in zip(squares, counts, strict=True):
        below += float(count) * torch.log(torch.erf(torch.sqrt(t / (2 * float(square)))))
    return float(torch.trapezoid(1 - torch.exp(below), t))

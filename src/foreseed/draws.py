"""Random numbers that are the same on every machine, in every version of NumPy and torch.

All that a run starts from (initial values, masks, partitions, samples of devices) is drawn here. Words come from
PCG64, whose stream NumPy promises never to change (unlike that of its `Generator`s), normals from the engine's own
generator (docs/protocol.md); what is made of them uses IEEE +, -, x, / and comparisons alone, one rounding each.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from foreseed.engine import Directions, direction

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Draws:
    """A stream of random numbers of its own for each (seed, path); each call goes on where the last one ended."""

    def __init__(self, seed: int, *path: int | str) -> None:
        digest = hashlib.sha256(repr((seed, *path)).encode()).digest()
        self._words = np.random.PCG64(int.from_bytes(digest[:16], "little"))
        self._normals = int.from_bytes(digest[16:24], "little")
        self._calls = 0

    def normals(self, *shape: int) -> npt.NDArray[np.float32]:
        """Standard normal numbers: one direction of the engine for each call."""
        self._calls += 1
        drawn = direction(Directions(self._normals, 0, 0, 1), self._calls, math.prod(shape))
        return np.asarray(drawn, np.float32).reshape(shape)

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        """Random words of 64 bits."""
        return self._words.random_raw(n)

    def uniforms(self, n: int) -> Floats:
        """Numbers in [0, 1), multiples of 2^-53."""
        return (self.words(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def permutation(self, n: int) -> Integers:
        """0 to n - 1 in random order."""
        return np.argsort(self.words(n), kind="stable")

    def choose(self, pool: npt.ArrayLike, count: int) -> list[int]:
        """`count` of the pool's numbers (all, if they are fewer), without replacement, in ascending order."""
        numbers = np.unique(pool)
        return sorted(int(number) for number in numbers[self.permutation(len(numbers))[:count]])

    def dirichlet(self, beta: float, n: int) -> Floats:
        """n shares that add up to 1 (to rounding), from the symmetric Dirichlet distribution."""
        # Gamma(beta) is Gamma(beta + 1) times a uniform number to the power of 1 / beta. In logarithms: with a small
        # beta all of them may be too small for a float, yet their shares are not.
        logs = _log(self._gammas(beta + 1, n)) + _log(1 - self.uniforms(n)) / beta
        weights = _exp(logs - logs.max())
        return weights / math.fsum(weights)

    def _gammas(self, shape: float, n: int) -> Floats:
        """Gamma(shape, 1) numbers for a shape of 1 or more, as Marsaglia and Tsang draw them."""
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        drawn, missing = np.empty(n), np.arange(n)
        while len(missing):
            x = self.normals(len(missing)).astype(np.float64)
            root = 1 + c * x
            v = root * root * root
            # 1 - u is above 0, where a logarithm is defined.
            bound = 0.5 * (x * x) + d * (1 - v + _log(np.where(v > 0, v, 1.0)))
            accepted = (v > 0) & (_log(1 - self.uniforms(len(missing))) < bound)
            drawn[missing[accepted]] = d * v[accepted]
            missing = missing[~accepted]
        return drawn


_LN2 = 0.6931471805599453
_SQRT_HALF = math.sqrt(0.5)


def _log(x: Floats) -> Floats:
    """Natural logarithms, as the engine makes them: no two libraries agree on the last bit of theirs."""
    m, e = np.frexp(x)
    low = m < _SQRT_HALF
    m, e = np.where(low, 2 * m, m), e - low
    f = (m - 1) / (m + 1)
    total = np.zeros_like(f)
    for i in range(21, 0, -2):
        total = total * (f * f) + 2 / i
    logarithm: Floats = e * _LN2 + f * total
    return logarithm


def _exp(x: Floats) -> Floats:
    """Exponentials; below -700 they are 0."""
    n = np.rint(np.maximum(x, -700.0) / _LN2)
    r = np.maximum(x, -700.0) - n * _LN2
    total = np.zeros_like(r)
    for i in range(14, -1, -1):
        total = total * r + 1 / math.factorial(i)
    return np.where(x > -700.0, np.ldexp(total, n.astype(np.int64)), 0.0)

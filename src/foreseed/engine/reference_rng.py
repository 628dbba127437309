"""Directions and updates in NumPy, to the bit of `docs/protocol.md`.

Each line is one rounded float32 operation after another, as the page writes them: NumPy never fuses a multiply
with an add, so what stands here is what every other implementation must give.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreseed.engine.errors import ValuesError
from foreseed.engine.types import (
    NOT_A_DIFFERENCE,
    Buffer,
    Directions,
    check_compared,
    check_quantiser,
    check_rebuilt,
    code_bytes,
)

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)

# Coefficients from the highest power down, as Horner's rule meets them.
_A = np.array([59.109374720, 159.29113202, 50.434271938, 3.3871327179], np.float32)
_B = np.array([67.187563600, 78.757757664, 17.895169469, 1], np.float32)
_C = np.array([0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777], np.float32)
_D = np.array([0.12021132975, 0.73700164250, 1], np.float32)
_G = np.array([2 / 9, 2 / 7, 2 / 5, 2 / 3, 2], np.float32)
_LN2 = np.float32(0.69314718056)
_SPLIT, _SPLIT_SQUARED, _TAIL_SHIFT = np.float32(0.425), np.float32(0.180625), np.float32(1.6)
_ONE, _HALF_STEP, _WORD = np.float32(1), np.float32(0.5), np.float32(2.0**-32)
_SQRT_HALF_BITS = 0x3F3504F3
_ROUNDING_WORDS = 0xFFFFFFFF
"""In the place of a direction's number, less the number of the block: no direction has such a number."""


def philox(counter: Sequence[ArrayLike], seed: int) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four words for a counter of four words (or arrays of them), with a 64-bit seed for a key."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        left, right = _M1 * c2, _M0 * c0
        c0, c1 = (left >> _HALF) ^ c1 ^ np.uint64(k0), left & _LOW
        c2, c3 = (right >> _HALF) ^ c3 ^ np.uint64(k1), right & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def direction(d: Directions, k: int, n: int, start: int = 0) -> Floats:
    """Coordinates `start` to `start + n` of direction k."""
    per_block, numbers = _KINDS[d.kind]
    first, end = start // per_block, -(-(start + n) // per_block)
    words = np.stack(philox((np.arange(first, end), k, d.device, d.round), d.seed), axis=-1).ravel()
    z = numbers(words)
    return z[start - first * per_block :][:n]


def normals(words: Words) -> Floats:
    """The normal number that each random word stands for: the inverse normal CDF, AS 241's PPND7."""
    s = words.view(np.int32)
    q = (s.astype(np.float32) + _HALF_STEP) * _WORD
    r = _SPLIT_SQUARED - q * q
    z = (q * _horner(_A, r)) / _horner(_B, r)
    tail = np.abs(q) > _SPLIT
    z[tail] = np.copysign(_tail(s[tail]), q[tail])
    return z


def _tail(s: NDArray[np.int32]) -> Floats:
    # From the nearer end of the range, where the words still resolve probabilities that q has rounded away.
    wide = s.astype(np.int64)
    t = np.where(wide >= 0, 2**31 - 1 - wide, 2**31 + wide)
    p = (t.astype(np.float32) + _HALF_STEP) * _WORD
    r = np.sqrt(-_ln(p)) - _TAIL_SHIFT
    return _horner(_C, r) / _horner(_D, r)


def _ln(p: Floats) -> Floats:
    """The natural logarithm, from +, -, x and / alone: no two libraries agree on the last bit of theirs."""
    bits = p.view(np.int32)
    e = (bits - _SQRT_HALF_BITS) >> 23
    m = (bits - (e << 23)).view(np.float32)
    f: Floats = (m - _ONE) / (m + _ONE)
    return e.astype(np.float32) * _LN2 + f * _horner(_G, f * f)


def _horner(coefficients: Floats, x: Floats) -> Floats:
    value: Floats = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


def _signs(words: Words) -> Floats:
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    return np.where(bits, -_ONE, _ONE)


# Coordinates of a block of four words, and how they come from it.
_KINDS = {"gaussian": (4, normals), "rademacher": (128, _signs)}


@np.errstate(over="ignore", invalid="ignore")
def perturb(values: Buffer, d: Directions, k: int) -> Floats:
    """A copy of the values, moved by sigma along direction k."""
    w = floats(values)
    return w + np.float32(d.sigma) * direction(d, k, len(w))


@np.errstate(over="ignore", invalid="ignore")
def accumulate(gradient: Buffer, d: Directions, coefficients: Buffer, start: int = 0) -> None:
    """Add each direction times its coefficient to (a range of) a gradient estimate, in place."""
    g, factors = floats(gradient), floats(coefficients)
    if len(factors) != d.count:
        raise ValuesError(f"{len(factors)} coefficients for {d.count} directions: expected one each")
    for k, c in zip(d.numbers(), factors, strict=True):
        g += c * direction(d, k, len(g), start)


@np.errstate(over="ignore", invalid="ignore")
def rebuild(
    gradient: Buffer, halves: Buffer, parts: Sequence[Directions], coefficients: Buffer, start: int, n: int
) -> None:
    """Add every part's directions (with a step of 1), times their coefficients, to a gradient of all values.

    Of the directions, which perturb the same values, n coordinates from `start` on. `halves`, two vectors a part, get
    in the same places what the first half of its directions and the others have added.
    """
    whole, factors, room = floats(gradient), floats(coefficients), floats(halves)
    span = check_rebuilt(parts, len(whole), len(factors), len(room), (start, start + n))
    here, spread_out = whole[span], room.reshape(len(parts), 2, -1)[:, :, span]
    used = 0
    for both, d in zip(spread_out, parts, strict=True):
        for half, first, end in ((both[0], 0, d.count // 2), (both[1], d.count // 2, d.count)):
            half[:] = here
            if first < end:
                some = Directions(d.seed, d.round, d.device, end - first, d.first + first, kind=d.kind)
                accumulate(here, some, factors[used + first : used + end], start)
            np.subtract(here, half, out=half)
        used += d.count


@np.errstate(over="ignore", invalid="ignore")
def compare(halves: Buffer, n: int, sums: Buffer, products: Buffer) -> None:
    """Of parts that are two halves of n numbers each: the sums of the first and of the last halves, in float64.

    `products` get two numbers a part: the part's product with itself, and with the sum of all parts.
    """
    numbers, totals, found = floats(halves), np.frombuffer(sums), np.frombuffer(products)
    count = check_compared(len(numbers), n, len(totals), len(found))
    parts = numbers.reshape(count, 2, n).astype(np.float64)
    totals[:] = parts.cumsum(axis=0)[-1].ravel()
    whole = totals[:n] + totals[n:]
    for i, (first, last) in enumerate(parts):
        found[2 * i] = _chained((first + last) * (first + last))
        found[2 * i + 1] = _chained((first + last) * whole)


@np.errstate(over="ignore", invalid="ignore")
def project(d: Directions, vector: Buffer) -> array[float]:
    """The inner product of every direction with a vector: directional derivatives, if it is a gradient."""
    numbers = np.frombuffer(vector, np.float32)
    return array("d", [_chained(direction(d, k, len(numbers)).astype(np.float64) * numbers) for k in d.numbers()])


def _chained(products: NDArray[np.float64]) -> float:
    """Their sum in eight chains, number j in chain j mod 8, then the chains in order: as the C engine adds."""
    padded = np.zeros(-(-len(products) // 8) * 8)
    padded[: len(products)] = products
    total = 0.0
    for chain in padded.reshape(-1, 8).cumsum(axis=0)[-1] if len(padded) else ():
        total += float(chain)
    return total


def sgd(values: Buffer, momentum: Buffer | None, gradient: Buffer, lr: float, mu: float, decay: float) -> None:
    """One step of gradient descent, in place; without a momentum `mu` must be 0."""
    if momentum is None and mu != 0:
        raise ValuesError(f"mu is {mu} and there is no momentum: expected one of as many numbers as there are values")
    w, g, *v = _alike(values, gradient, *([] if momentum is None else [momentum]))
    step = g + np.float32(decay) * w
    if v:
        v[0][:] = step = np.float32(mu) * v[0] + step
    w -= np.float32(lr) * step


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def adam(
    values: Buffer, m: Buffer, v: Buffer, gradient: Buffer,
    lr: float, beta1: float, beta2: float, eps: float, decay: float, k1: float, k2: float,
) -> None:  # fmt: skip
    """One step of Adam, in place; `k1` and `k2` are its bias corrections."""
    w, first, second, g = _alike(values, m, v, gradient)
    b1, b2 = np.float32(beta1), np.float32(beta2)
    d = g + np.float32(decay) * w
    first[:] = b1 * first + (_ONE - b1) * d
    second[:] = b2 * second + ((_ONE - b2) * d) * d
    w -= (np.float32(lr) * (first * np.float32(k1))) / (np.sqrt(second * np.float32(k2)) + np.float32(eps))


def quantise(
    differences: Buffer, bits: int, seed: int, round: int, device: int, block: int = 0
) -> tuple[float, memoryview]:
    """Pack loss differences in place, in 1, 2, 4 or 8 bits each; returns their scale and the bytes of the codes.

    Each `block` of a round's values is rounded in its own way.
    """
    numbers = floats(differences)
    n = len(numbers)
    check_quantiser(n, bits, block)
    if not np.isfinite(numbers).all():
        raise ValuesError(NOT_A_DIFFERENCE)
    sizes = np.abs(numbers).astype(np.float64)
    if bits == 1:
        codes = (numbers < 0).astype(np.uint8)
        scale = np.float32(sizes.cumsum()[-1] / n)  # cumsum adds one after the other
    else:
        scale = np.float32(sizes.max())
        counter = (np.arange(-(-n // 4)), _ROUNDING_WORDS - block, device, round)
        words = np.stack(philox(counter, seed), axis=-1).ravel()[:n]
        codes = _rounded(numbers.astype(np.float64), float(scale), 2**bits - 1, words)
    spread_out = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    packed = memoryview(differences).cast("B")[: code_bytes(n, bits)]
    packed[:] = np.packbits(spread_out.ravel(), bitorder="little").tobytes()
    return float(scale), packed


def _rounded(numbers: NDArray[np.float64], scale: float, levels: int, words: Words) -> NDArray[np.uint8]:
    """The level below or above each number, the nearer the likelier."""
    if scale == 0:
        return np.zeros(len(numbers), np.uint8)
    level = (numbers / scale + 1) / 2 * levels
    below = np.floor(level)
    codes: NDArray[np.float64] = np.minimum(below + (words / 2.0**32 < level - below), levels)
    return codes.astype(np.uint8)


def floats(buffer: Buffer) -> Floats:
    """A buffer of float32 as an array, in place."""
    return np.frombuffer(buffer, np.float32)


def _alike(*buffers: Buffer) -> list[Floats]:
    arrays = [floats(buffer) for buffer in buffers]
    lengths = [len(x) for x in arrays]
    if len(set(lengths)) > 1:
        raise ValuesError(f"vectors of {lengths} numbers: expected the same length for all")
    return arrays

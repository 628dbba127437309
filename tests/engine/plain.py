"""`docs/protocol.md` in plain Python, one number at a time, without NumPy or C: what both are held against.

Python computes in float64; rounding each result to float32 gives the very float32 operation, since 53 bits are more
than twice 24 (so a second rounding never matters for +, -, x, / and sqrt).
"""

from __future__ import annotations

import math
import struct
from itertools import count

from foreseed.engine.types import Directions

M0, M1 = 0xD2511F53, 0xCD9E8D57
LOW = 0xFFFFFFFF


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def to_bits(x: float) -> str:
    return struct.pack(">f", x).hex()


def from_bits(bits: str) -> float:
    return struct.unpack(">f", bytes.fromhex(bits))[0]


def _keys(seed: int) -> list[tuple[int, int]]:
    return [((seed + i * 0x9E3779B9) & LOW, ((seed >> 32) + i * 0xBB67AE85) & LOW) for i in range(10)]


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    for k0, k1 in _keys(seed):
        c0, c1, c2, c3 = (M1 * c2 >> 32) ^ c1 ^ k0, M1 * c2 & LOW, (M0 * c0 >> 32) ^ c3 ^ k1, M0 * c0 & LOW
    return c0, c1, c2, c3


def unphilox(words: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """The counter that gives these words: the generator is a permutation, so there is exactly one."""
    w0, w1, w2, w3 = words
    for k0, k1 in reversed(_keys(seed)):
        c0, c2 = w3 * pow(M0, -1, 2**32) & LOW, w1 * pow(M1, -1, 2**32) & LOW
        w0, w1, w2, w3 = c0, w0 ^ (M1 * c2 >> 32) ^ k0, c2, w2 ^ (M0 * c0 >> 32) ^ k1
    return w0, w1, w2, w3


def where(word: int, seed: int = 0) -> tuple[Directions, int, int]:
    """A direction, its number k and the coordinate in it whose random word is this one."""
    for i in count():
        block, k, device, round_ = unphilox((word, i, 0, 0), seed)
        if block < 2**30:  # coordinates are 32-bit numbers
            return Directions(seed, round_, device, 1, first=k), k, 4 * block
    raise AssertionError("count() ends")


def ln(p: float) -> float:
    b = struct.unpack("<I", struct.pack("<f", p))[0]
    e = (b - 0x3F3504F3) >> 23
    m = struct.unpack("<f", struct.pack("<I", b - (e << 23)))[0]
    f = f32(f32(m - 1) / f32(m + 1))
    return f32(f32(e * f32(0.69314718056)) + f32(f * horner(f32(f * f), 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2)))


def horner(x: float, *coefficients: float) -> float:
    value = f32(coefficients[0])
    for coefficient in coefficients[1:]:
        value = f32(f32(value * x) + f32(coefficient))
    return value


def normal(word: int) -> float:
    s = word - 2**32 if word >> 31 else word
    q = f32(f32(f32(s) + 0.5) * 2.0**-32)
    if abs(q) <= f32(0.425):
        r = f32(f32(0.180625) - f32(q * q))
        numerator = horner(r, 59.109374720, 159.29113202, 50.434271938, 3.3871327179)
        return f32(f32(q * numerator) / horner(r, 67.187563600, 78.757757664, 17.895169469, 1))
    t = 2**31 - 1 - s if s >= 0 else 2**31 + s
    r = f32(f32(math.sqrt(-ln(f32(f32(f32(t) + 0.5) * 2.0**-32)))) - f32(1.6))
    z = f32(
        horner(r, 0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777) / horner(r, 0.12021132975, 0.73700164250, 1)
    )
    return math.copysign(z, q)


def coordinate(d: Directions, k: int, j: int) -> float:
    if d.kind == "gaussian":
        return normal(philox((j // 4, k, d.device, d.round), d.seed)[j % 4])
    word = philox((j // 128, k, d.device, d.round), d.seed)[j // 32 % 4]
    return -1.0 if word >> j % 32 & 1 else 1.0


def direction(d: Directions, k: int, n: int, start: int = 0) -> list[float]:
    return [coordinate(d, k, j) for j in range(start, start + n)]


def perturb(values: list[float], d: Directions, k: int) -> list[float]:
    return [f32(w + f32(f32(d.sigma) * coordinate(d, k, j))) for j, w in enumerate(values)]


def accumulate(gradient: list[float], d: Directions, coefficients: list[float], start: int = 0) -> list[float]:
    for k, c in zip(d.numbers(), coefficients, strict=True):
        gradient = [f32(g + f32(c * coordinate(d, k, start + j))) for j, g in enumerate(gradient)]
    return gradient


def sgd(
    values: list[float], momentum: list[float] | None, gradient: list[float], lr: float, mu: float, decay: float
) -> tuple[list[float], list[float] | None]:
    """The new values and momentum."""
    lr, mu, decay = f32(lr), f32(mu), f32(decay)
    step = [f32(g + f32(decay * w)) for g, w in zip(gradient, values, strict=True)]
    if momentum is not None:
        momentum = step = [f32(f32(mu * v) + d) for v, d in zip(momentum, step, strict=True)]
    return [f32(w - f32(lr * d)) for w, d in zip(values, step, strict=True)], momentum


def adam(
    values: list[float], m: list[float], v: list[float], gradient: list[float],
    lr: float, beta1: float, beta2: float, eps: float, decay: float, k1: float, k2: float,
) -> tuple[list[float], list[float], list[float]]:  # fmt: skip
    """The new values, m and v."""
    lr, beta1, beta2, eps, decay, k1, k2 = map(f32, (lr, beta1, beta2, eps, decay, k1, k2))
    step = [f32(g + f32(decay * w)) for g, w in zip(gradient, values, strict=True)]
    m = [f32(f32(beta1 * x) + f32(f32(1 - beta1) * d)) for x, d in zip(m, step, strict=True)]
    v = [f32(f32(beta2 * x) + f32(f32(f32(1 - beta2) * d) * d)) for x, d in zip(v, step, strict=True)]
    moved = [
        f32(w - f32(f32(lr * f32(a * k1)) / f32(f32(math.sqrt(f32(b * k2))) + eps)))
        for w, a, b in zip(values, m, v, strict=True)
    ]
    return moved, m, v


def quantise(
    differences: list[float], bits: int, seed: int, round: int, device: int, block: int = 0
) -> tuple[float, bytes]:
    """The scale and the packed codes of loss differences."""
    n, levels = len(differences), 2**bits - 1
    sizes, total = [abs(x) for x in differences], 0.0
    for size in sizes:
        total += size
    scale = f32(total / n) if bits == 1 else max(sizes)
    packed = 0
    for i, x in enumerate(differences):
        code = int(x < 0)
        if bits > 1:
            word = philox((i // 4, LOW - block, device, round), seed)[i % 4]
            level = (x / scale + 1) / 2 * levels if scale else 0.0
            code = min(math.floor(level) + (word / 2**32 < level - math.floor(level)), levels)
        packed |= code << i * bits
    return scale, packed.to_bytes(-(-n * bits // 8), "little")

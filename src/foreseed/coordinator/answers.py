"""What a reply's losses say: whole float32 numbers, or a scale and codes of a few bits (`docs/protocol.md`)."""

from __future__ import annotations

from math import pi
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreseed.engine.types import code_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foreseed.coordinator.coordinator import Rules
    from foreseed.wire import Reply

Array = npt.NDArray[np.float64]


def differences(reply: Reply, rules: Rules) -> Array:
    """The loss differences of a reply without fault, as the server uses them."""
    if rules.bits == 32:
        return np.frombuffer(reply.losses, "<f4")[1:].astype(np.float64)
    scales = np.repeat(_numbers(reply, rules)[1:].astype(np.float64), [block.k for block in rules.probed])
    codes = np.concatenate([_codes(packed, k, rules.bits) for packed, k in _packed(reply, rules)])
    if rules.bits == 1:
        # A slope along a Gaussian direction has the mean size sqrt(2/pi) |g|, and the directions, each with the sign
        # of its slope, the mean sqrt(2/pi) g/|g|: pi/2 makes the product of the two the gradient g.
        signed: Array = (pi / 2 * scales) * (1.0 - 2.0 * codes)
        return signed
    values: Array = scales * (2.0 * codes / (2**rules.bits - 1) - 1.0)
    return values


def fault(reply: Reply, rules: Rules) -> str | None:
    """Why a reply's losses cannot be used."""
    bits = rules.bits
    packed = 4 * rules.scalars if bits == 32 else sum(4 + code_bytes(block.k, bits) for block in rules.probed)
    if len(reply.losses) != 4 + packed:
        return "wrong length"
    if not np.isfinite(_numbers(reply, rules)).all():
        return "not finite"
    if bits == 32:
        return None
    if (_numbers(reply, rules)[1:] < 0).any():
        return "negative scale"
    # One answer has one encoding: what nobody reads must be 0.
    unused = any(codes[-1] >> (8 - (8 * len(codes) - k * bits)) for codes, k in _packed(reply, rules))
    return "unused bits set" if unused else None


def _numbers(reply: Reply, rules: Rules) -> npt.NDArray[np.float32]:
    """What of the losses is float32 numbers."""
    return np.frombuffer(reply.losses, "<f4", -1 if rules.bits == 32 else 1 + len(rules.probed))


def _packed(reply: Reply, rules: Rules) -> Iterator[tuple[bytes, int]]:
    """Every block's codes, and how many they are."""
    at = 4 * (1 + len(rules.probed))
    for block in rules.probed:
        end = at + code_bytes(block.k, rules.bits)
        yield reply.losses[at:end], block.k
        at = end


def _codes(packed: bytes, n: int, bits: int) -> Array:
    unpacked = np.unpackbits(np.frombuffer(packed, np.uint8), count=n * bits, bitorder="little").reshape(n, bits)
    return unpacked @ (2.0 ** np.arange(bits))

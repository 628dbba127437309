"""What a reply's losses say: whole float32 numbers, or a scale and codes of a few bits (`docs/protocol.md`)."""

from __future__ import annotations

from math import pi
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreseed.engine.types import code_bytes

if TYPE_CHECKING:
    from foreseed.coordinator.coordinator import Rules
    from foreseed.wire import Reply

Array = npt.NDArray[np.float64]

_HEAD = 8
"""Bytes of the base loss and the scale, ahead of codes."""


def differences(reply: Reply, rules: Rules) -> Array:
    """The loss differences of a reply without fault, as the server uses them."""
    if rules.bits == 32:
        return np.frombuffer(reply.losses, "<f4")[1:].astype(np.float64)
    scale, codes = float(_numbers(reply, rules)[1]), _codes(reply.losses[_HEAD:], rules.scalars, rules.bits)
    if rules.bits == 1:
        # A slope along a Gaussian direction has the mean size sqrt(2/pi) |g|, and the directions, each with the sign
        # of its slope, the mean sqrt(2/pi) g/|g|: pi/2 makes the product of the two the gradient g.
        return (pi / 2 * scale) * (1.0 - 2.0 * codes)
    values: Array = scale * (2.0 * codes / (2**rules.bits - 1) - 1.0)
    return values


def fault(reply: Reply, rules: Rules) -> str | None:
    """Why a reply's losses cannot be used."""
    losses, n, bits = reply.losses, rules.scalars, rules.bits
    if len(losses) != (4 * (1 + n) if bits == 32 else _HEAD + code_bytes(n, bits)):
        return "wrong length"
    if not np.isfinite(_numbers(reply, rules)).all():
        return "not finite"
    if bits == 32:
        return None
    if _numbers(reply, rules)[1] < 0:
        return "negative scale"
    # One answer has one encoding: what nobody reads must be 0.
    unused = 8 * code_bytes(n, bits) - n * bits
    return "unused bits set" if losses[-1] >> (8 - unused) else None


def _numbers(reply: Reply, rules: Rules) -> npt.NDArray[np.float32]:
    """What of the losses is float32 numbers."""
    return np.frombuffer(reply.losses, "<f4", -1 if rules.bits == 32 else 2)


def _codes(packed: bytes, n: int, bits: int) -> Array:
    unpacked = np.unpackbits(np.frombuffer(packed, np.uint8), count=n * bits, bitorder="little").reshape(n, bits)
    return unpacked @ (2.0 ** np.arange(bits))

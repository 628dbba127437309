"""An op of a program: its record in the format. What it does is in the table of `parts`."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

Shape = tuple[int, int, int]
"""Channels, height and width of a tensor."""
Window = tuple[int, int, int, int, int, int]
"""Kernel, stride and padding, each by rows and columns."""

PARAMETERS, SHARED, CEIL = 1, 2, 4
"""The flags of an op: it has a bias or an affine, it uses the values of an earlier op, its pool is in ceil mode."""

DENSE = 255
LARGEST = 1 << 28
"""The most weights of a layer and numbers of a tensor."""
OP = struct.Struct("<BBBBHHHH6HB6BBIf")


class Kind(IntEnum):
    """What an op does."""

    CONV = 1
    POOL = 2
    NORM = 3
    ADD = 4
    ACT = 5
    MUL = 6
    CAT = 7
    PAD = 8


class Act(IntEnum):
    """The activation an op applies to its result."""

    NONE = 0
    RELU = 1
    HARDSWISH = 2
    RELU6 = 3
    LEAKY_RELU = 4
    HARDSIGMOID = 5
    SIGMOID = 6
    SILU = 7
    TANH = 8
    GELU = 9
    GELU_TANH = 10


class Pool(IntEnum):
    """How a pooling window is reduced."""

    NONE = 0
    MAX = 1
    AVERAGE = 2
    AVERAGE_INSIDE = 3
    ADAPTIVE = 4


@dataclass(frozen=True)
class Op:
    """One op of a program; the fields are those of `docs/format.md`."""

    kind: Kind
    a: int
    b: int = 0
    act: Act = Act.NONE
    flags: int = 0
    rice: int = 0
    channels: int = 0
    groups: int = 0
    window: Window = (0, 0, 0, 0, 0, 0)
    pool: Pool = Pool.NONE
    pool_window: Window = (0, 0, 0, 0, 0, 0)
    n_weights: int = 0
    eps: float = 0.0
    dilation: tuple[int, int] = (1, 1)
    """Of a conv; stands where other ops have `b`."""
    slope: float = 0.0
    """Of a LeakyReLU; stands where norms have `eps`."""

    @property
    def has_parameters(self) -> bool:
        """A conv with a bias, or a norm with an affine."""
        return bool(self.flags & PARAMETERS)

    @property
    def owner(self) -> int | None:
        """The earlier op whose values it uses, if it has none of its own; stands where convs have `rice`."""
        return self.rice if self.flags & SHARED else None

    @property
    def version(self) -> int:
        """The first version of the format that has such an op."""
        known = self.kind <= Kind.ACT and self.act <= Act.HARDSWISH and self.pool <= Pool.AVERAGE_INSIDE
        return 1 if known and self.flags <= PARAMETERS and self.dilation == (1, 1) else 2

    def encode(self) -> bytes:
        dh, dw = self.dilation
        number = self.slope if self.act is Act.LEAKY_RELU and self.kind is not Kind.NORM else self.eps
        return OP.pack(
            self.kind, self.act, self.flags, self.rice, self.a, self.b | dh - 1 | dw - 1 << 8, self.channels,
            self.groups, *self.window, self.pool, *self.pool_window, 0, self.n_weights, number,
        )  # fmt: skip

    @staticmethod
    def decode(record: bytes) -> Op:
        f = OP.unpack(record)
        kind, act, b, number = Kind(f[0]), Act(f[1]), f[5], f[23]
        op = Op(kind, f[4], b, act, f[2], f[3], f[6], f[7], f[8:14], Pool(f[14]), f[15:21], f[22], number)
        if kind is Kind.CONV:
            op = replace(op, b=0, dilation=(1 + (b & 0xFF), 1 + (b >> 8)))
        return replace(op, eps=0.0, slope=number) if act is Act.LEAKY_RELU and kind is not Kind.NORM else op

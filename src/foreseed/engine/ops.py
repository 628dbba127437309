"""An op of a program: its record in the format. What it does is in the table of `parts`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

Shape = tuple[int, int, int]
"""Channels, height and width of a tensor."""
Window = tuple[int, int, int, int, int, int]
"""Kernel, stride and padding, each by rows and columns."""

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


class Act(IntEnum):
    """The activation an op applies to its result."""

    NONE = 0
    RELU = 1
    HARDSWISH = 2


class Pool(IntEnum):
    """How a pooling window is reduced."""

    NONE = 0
    MAX = 1
    AVERAGE = 2
    AVERAGE_INSIDE = 3


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

    @property
    def has_parameters(self) -> bool:
        """A conv with a bias, or a norm with an affine."""
        return bool(self.flags & 1)

    def encode(self) -> bytes:
        return OP.pack(
            self.kind, self.act, self.flags, self.rice, self.a, self.b, self.channels, self.groups,
            *self.window, self.pool, *self.pool_window, 0, self.n_weights, self.eps,
        )  # fmt: skip

    @staticmethod
    def decode(record: bytes) -> Op:
        f = OP.unpack(record)
        return Op(
            Kind(f[0]), f[4], f[5], Act(f[1]), f[2], f[3], f[6], f[7],
            f[8:14], Pool(f[14]), f[15:21], f[22], f[23],
        )  # fmt: skip

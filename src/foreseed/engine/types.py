"""What every engine takes: samples and directions. Standard library only: a device loads this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from foreseed.engine.errors import ForeseedError, SamplesError

Buffer: TypeAlias = Any
"""Anything with the buffer protocol: bytes, bytearray, memoryview, array, mmap, a NumPy array."""

SHARED_DEVICE = 0xFFFFFFFF
"""The device number that directions carry when all devices share them."""

DirectionKind = Literal["gaussian", "rademacher"]


@dataclass(frozen=True)
class Samples:
    """Uint8 images (channels x height x width each) and their labels, where they lie in memory.

    Image `i` starts at byte `image_offset + i * stride` of `data`, its label is the byte at
    `label_offset + i * stride`: a shard in the CIFAR binary layout is read in place.
    """

    data: Buffer
    count: int
    stride: int
    image_offset: int = 1
    label_offset: int = 0

    @staticmethod
    def records(data: Buffer, image_bytes: int, first: int = 0, count: int | None = None) -> Samples:
        """Samples of a shard: records of a label byte followed by the pixels."""
        stride = image_bytes + 1
        size = memoryview(data).nbytes
        n = size // stride if count is None else count
        if size % stride or n < 1 or first < 0 or (first + n) * stride > size:
            raise SamplesError(
                f"samples {first} to {first + n} of {size} bytes with {stride} bytes a record: "
                "expected at least one whole record; check the shard and the program's input shape"
            )
        return Samples(data, n, stride, first * stride + 1, first * stride)

    def part(self, first: int, count: int) -> Samples:
        """A run of consecutive samples."""
        if first < 0 or count < 1 or first + count > self.count:
            raise SamplesError(f"samples {first} to {first + count} of {self.count}: expected a part that is there")
        shift = first * self.stride
        return Samples(self.data, count, self.stride, self.image_offset + shift, self.label_offset + shift)


@dataclass(frozen=True)
class Directions:
    """Directions `first, first + step, ...` (`count` of them) of one device in one round."""

    seed: int
    round: int
    device: int
    count: int
    first: int = 0
    step: int = 1
    kind: DirectionKind = "gaussian"
    sigma: float = 1e-4

    def __post_init__(self) -> None:
        last = self.first + self.step * (self.count - 1)
        if not 0 <= self.seed < 1 << 64:
            raise ForeseedError(f"seed {self.seed}: expected a number from 0 to 2^64 - 1")
        if self.count < 1 or min(self.first, self.step, last) < 0 or max(self.round, self.device, last) >= 1 << 32:
            raise ForeseedError(f"{self}: expected at least one direction, and numbers below 2^32")
        if self.kind not in ("gaussian", "rademacher"):
            raise ForeseedError(f"directions of kind {self.kind!r}: expected 'gaussian' or 'rademacher'")

    def numbers(self) -> range:
        """The numbers k of these directions."""
        return range(self.first, self.first + self.step * self.count, self.step)

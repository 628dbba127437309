"""What every engine takes: samples and directions, how they are shared out, and how long packed differences are.

Plain classes, and no `typing` or `dataclasses` at run time: a device loads this module (see `head.py`).
"""

from __future__ import annotations

from itertools import pairwise

from foreseed.engine.errors import ForeseedError, SamplesError, ValuesError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Literal, TypeAlias

    Buffer: TypeAlias = Any
    """Anything with the buffer protocol: bytes, bytearray, memoryview, array, mmap, a NumPy array."""
    DirectionKind = Literal["gaussian", "rademacher"]
else:
    Buffer, DirectionKind = object, str

SHARED_DEVICE = 0xFFFFFFFF
"""The device number that directions carry when all devices share them."""

BITS = (1, 2, 4, 8, 32)
"""How many bits of a reply a loss difference may take; 32 is the float32 number itself."""
BLOCK = 256
"""Images that are probed together: more would be in memory at once, fewer would make the directions more often."""
NOT_A_DIFFERENCE = "a loss is larger than float32 holds; lower the learning rate or sigma"


def code_bytes(n: int, bits: int) -> int:
    """Bytes of n codes of so many bits, packed."""
    return (n * bits + 7) // 8


def check_quantiser(n: int, bits: int, block: int = 0) -> None:
    """Refuse what no quantiser can do."""
    if not 0 <= block < 1 << 16:
        raise ForeseedError(f"loss differences of block {block}: expected a number from 0 to 65535")
    if n < 1 or bits not in BITS[:-1]:
        raise ForeseedError(f"{n} loss differences in {bits} bits each: expected at least one, in 1, 2, 4 or 8 bits")


def split(count: int, spread: int) -> list[tuple[int, int]]:
    """The parts of `count` images as (first, count): consecutive, and equal but for one image."""
    parts = min(spread, count)
    edges = [part * count // parts for part in range(parts + 1)]
    return [(first, end - first) for first, end in pairwise(edges)]


def forward_passes(samples: int, k: int, spread: int = 1, central: bool = False, local_steps: int = 1) -> int:
    """Single images that a device sends forward to answer one order.

    In every local step each direction takes a pass over its part of the images, on both sides for central differences;
    forward differences take one more over all images, for the base losses. Parts may differ by an image.
    """
    parts = min(spread, samples)
    # Each part has k // parts directions, and the first k % parts of them, which end at an edge, one more.
    probes = k // parts * samples + k % parts * samples // parts
    return local_steps * (2 * probes if central else samples + probes)


def check_rebuilt(parts: Sequence[Directions], n: int, given: int, halves: int, span: tuple[int, int]) -> slice:
    """Where these coordinates of the parts' directions lie in a gradient of n numbers; refused where they do not.

    So are coefficients, or room for halves, that do not fit the parts.
    """
    wanted = sum(part.count for part in parts)
    if given != wanted:
        raise ValuesError(f"{given} coefficients for {wanted} directions: expected one each")
    ranges = {(part.at, part.size) for part in parts}
    if len(ranges) > 1:
        raise ValuesError(f"directions of values (at, size) {sorted(ranges)}: expected the same range for all parts")
    at, size = (0, n) if not ranges or ranges == {(0, 0)} else ranges.pop()
    if not 0 <= span[0] <= span[1] <= size or at + size > n or halves != 2 * n * len(parts):
        raise ValuesError(
            f"coordinates {span[0]} to {span[1]} of {size}, {len(parts)} parts: expected room for them among "
            f"{n} numbers from {at} on"
        )
    return slice(at + span[0], at + span[1])


def check_compared(given: int, n: int, sums: int, products: int) -> int:
    """How many parts of two halves of n numbers these are; refused without room for their sums and products."""
    count = given // (2 * n) if n > 0 else 0
    if count < 1 or (given, sums, products) != (2 * n * count, 2 * n, 2 * count):
        raise ValuesError(
            f"{given} numbers in halves of {n}, room for {sums} sums and {products} products: expected {2 * n} sums, "
            "and 2 products a part"
        )
    return count


def check_kept(keep: Sequence[int], n_live: int) -> None:
    """Whether a program has the values that ranges of directions are to begin at."""
    for at in keep:
        if not 0 <= at < n_live:
            raise ForeseedError(
                f"keep what comes before value {at}: the program has {n_live}; expected one of them, is it for this "
                "program?"
            )


class _Plain:
    """Equality and a readable form from the fields in `__slots__`."""

    __slots__: tuple[str, ...] = ()

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, _Plain) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


class Samples(_Plain):
    """Uint8 images (channels x height x width each) and their labels, where they lie in memory.

    Image `i` starts at byte `image_offset + i * stride` of `data`, its label is the byte at
    `label_offset + i * stride`: a shard in the CIFAR binary layout is read in place.
    """

    __slots__ = ("count", "data", "image_offset", "label_offset", "stride")

    def __init__(self, data: Buffer, count: int, stride: int, image_offset: int = 1, label_offset: int = 0) -> None:
        self.data, self.count, self.stride = data, count, stride
        self.image_offset, self.label_offset = image_offset, label_offset

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


class Directions(_Plain):
    """Directions `first, first + step, ...` (`count` of them) of one device in one round.

    An engine perturbs `size` values along them, from value `at` on (coordinate j belongs to value `at + j`), or all
    values where `size` is 0. The functions of coordinates, such as `direction` and `accumulate`, ignore both.
    """

    __slots__ = ("at", "count", "device", "first", "kind", "round", "seed", "sigma", "size", "step")

    def __init__(
        self,
        seed: int,
        round: int,
        device: int,
        count: int,
        first: int = 0,
        step: int = 1,
        kind: DirectionKind = "gaussian",
        sigma: float = 1e-4,
        at: int = 0,
        size: int = 0,
    ) -> None:
        self.seed, self.round, self.device = seed, round, device
        self.count, self.first, self.step = count, first, step
        self.kind: DirectionKind = kind
        self.sigma = sigma
        self.at, self.size = at, size
        last = first + step * (count - 1)
        if not 0 <= seed < 1 << 64:
            raise ForeseedError(f"seed {seed}: expected a number from 0 to 2^64 - 1")
        if count < 1 or min(round, device, first, step, last) < 0 or max(round, device, last) >= 1 << 32:
            raise ForeseedError(f"{self}: expected at least one direction, and numbers from 0 to 2^32 - 1")
        if kind not in ("gaussian", "rademacher"):
            raise ForeseedError(f"directions of kind {kind!r}: expected 'gaussian' or 'rademacher'")
        if min(at, size) < 0 or max(at, size) >= 1 << 32 or (at and not size):
            raise ForeseedError(
                f"directions of {size} values from {at} on: expected numbers from 0 to 2^32 - 1, and 0 for all values"
            )

    def numbers(self) -> range:
        """The numbers k of these directions."""
        return range(self.first, self.first + self.step * self.count, self.step)

    def perturbed(self, n_live: int) -> slice:
        """Which of a program's values they perturb; refused if it has not so many."""
        if self.at + self.size > n_live:
            raise ForeseedError(
                f"directions of values {self.at} to {self.at + self.size}: the program has {n_live}; "
                "expected a range of them, is it for this program?"
            )
        return slice(self.at, self.at + (self.size or n_live))

"""Blocks: directions that perturb the same layers. A device loads this module.

Directions need not perturb all values. Those of a block perturb the values of some layers that follow each other, so
that what earlier layers make of an image need not be computed again for each of them; and the noise of one block's
estimate does not depend on the slopes of the others. One block of all values is the paper.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NamedTuple

    class Block(NamedTuple):
        """What an order says of a block."""

        values: int
        """How many it perturbs, from where the block before it ends; 0 = all, for the only block."""
        k: int
        """Directions."""
        spread: int
        """Each is probed on one of so many parts of the images."""

    class Span(NamedTuple):
        """A block where it stands."""

        at: int
        """Its first value."""
        size: int
        """How many; 0 = all."""
        first: int
        """Its first direction."""
        k: int
        spread: int

else:  # `typing` would cost a device 1.4 MB
    Block = namedtuple("Block", "values k spread")
    Span = namedtuple("Span", "at size first k spread")


def probed(blocks: tuple[Block, ...], k: int, spread: int) -> tuple[Block, ...]:
    """The blocks, or, where there are none, the one of all values that k directions are."""
    return blocks or (Block(0, k, spread),)


def spans(blocks: Sequence[Block]) -> list[Span]:
    """The blocks where they stand among values and directions."""
    found, at, first = [], 0, 0
    for values, k, spread in blocks:
        found.append(Span(at, values, first, k, spread))
        at, first = at + values, first + k
    return found


def starts(placed: Sequence[Span]) -> tuple[int, ...]:
    """Where blocks begin, but the first of them: what an engine keeps, to go on from there."""
    return tuple(span.at for span in placed[1:])

"""What a device computes: forward passes and FLOPs, counted from the program. Standard library only.

A FLOP is half a multiply-accumulate of a weight. What pruning leaves and what a dense model would take always stand
side by side, since masked tensors of a dense library save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreseed.engine.blocks import Block, spans
from foreseed.engine.program import Program
from foreseed.engine.types import forward_passes


@dataclass(frozen=True)
class Work:
    """What a device (or several, added up) computes."""

    forward_passes: int = 0
    """Single images, forward. A backward pass counts as two, passes through the last layers as what they come to."""
    flops: int = 0
    """Of live weights."""
    dense_flops: int = 0
    """The same, had nothing been pruned."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward_passes + other.forward_passes, self.flops + other.flops, self.dense_flops + other.dense_flops
        )


def forward_flops(program: Program) -> int:
    """FLOPs of the live weights for one image's forward pass."""
    return 2 * program.macs


def dense_forward_flops(program: Program) -> int:
    """The same, had nothing been pruned."""
    return 2 * program.dense_macs


def bp_free_work(
    program: Program, samples: int, blocks: Sequence[Block], central: bool = False, local_steps: int = 1
) -> Work:
    """What a device computes to answer one round over `samples` images, exactly as `foreseed.device.probing` goes.

    Directions of a block take passes from its first layer on; what comes before is computed once for each block.
    """
    layers, macs, dense_macs = program.layers(), 0, 0
    for span in spans(blocks):
        first = program.first_op(span.at) if span.size else 0
        passes = forward_passes(samples, span.k, span.spread, central, local_steps)
        before = layers[:first]
        once = samples if before else 0
        macs += passes * program.macs - (passes - once) * sum(layer.macs for layer in before)
        dense_macs += passes * program.dense_macs - (passes - once) * sum(layer.dense_macs for layer in before)
    return Work(-(-macs // program.macs), 2 * macs, 2 * dense_macs)


def bp_work(program: Program, samples: int, epochs: int = 1) -> Work:
    """What a device computes to train by backpropagation on `samples` images: forward once, backward twice that."""
    return forward_work(program, 3 * epochs * samples)


def forward_work(program: Program, passes: int) -> Work:
    """What so many forward passes of one image take."""
    return Work(passes, passes * forward_flops(program), passes * dense_forward_flops(program))

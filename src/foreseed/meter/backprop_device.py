"""A torch process that trains a program's dense model, for its memory to be measured.

As lean as torch allows: one thread, and the optimiser by hand (importing torch's own would take another 75 MB).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foreseed.device.memory import peak_bytes
from foreseed.engine.program import Program
from foreseed.engine.walker import Stage, run

_STEPS = 3


def main() -> None:
    """Train a program (a file) for a few steps with minibatches of so many images, and print the peak in bytes."""
    torch.set_num_threads(1)
    program, batch = Program(Path(sys.argv[1]).read_bytes()), int(sys.argv[2])
    shapes = [place.parameters.values() for place in program.places]
    net = [[(0.01 * torch.randn(shape)).requires_grad_() for shape in own] for own in shapes]
    trained = [p for parameters in net for p in parameters]
    velocities = [torch.zeros_like(p) for p in trained]
    images = torch.zeros(batch, *program.input_shape)
    for _ in range(_STEPS):
        loss = F.cross_entropy(logits(program, net, images), torch.zeros(batch, dtype=torch.int64))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for p, v in zip(trained, velocities, strict=True):
                assert p.grad is not None
                p.sub_(v.mul_(0.9).add_(p.grad), alpha=0.01)
                p.grad.zero_()
    print(peak_bytes())


def logits(program: Program, net: list[list[Tensor]], images: Tensor) -> Tensor:
    """The logits of images; `net` holds the parameters of every op."""

    def compute(stage: Stage, x: list[Tensor]) -> Tensor:
        made: Tensor = stage.part.torch(F, stage.op, x, net[stage.owner])
        return made

    return run(program.places, images, compute).flatten(1)

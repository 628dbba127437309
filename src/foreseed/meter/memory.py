"""What backpropagation must hold in memory, computed from the program. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from foreseed.engine.parts import Saved
from foreseed.engine.program import Program
from foreseed.engine.walker import Stage, run

_FLOAT, _INT64 = 4, 8


@dataclass(frozen=True)
class BpMemory:
    """The bytes that a training step by backpropagation holds.

    Everything is dense: torch trains a pruned model as masked dense tensors, so pruning saves none of this. What comes
    and goes within a layer (a gradient of an activation, a kernel's scratch) is not counted: this is a lower bound.
    """

    parameters: int
    """Weights, biases and norm parameters, and the running statistics of batch norms."""
    gradients: int
    """One number for each parameter."""
    optimiser: int
    """Momentum: one number for each parameter."""
    activations: int
    """What autograd saves of a batch for the backward pass (`saved_bytes`)."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.activations


def planned_bp_bytes(program: Program, batch: int, momentum: bool) -> BpMemory:
    """The memory of training this program's dense model by backpropagation with minibatches of `batch` images."""
    n = sum(prod(shape) for place in program.places for shape in place.parameters.values())
    return BpMemory(
        parameters=_FLOAT * (n + program.n_stats),
        gradients=_FLOAT * n,
        optimiser=_FLOAT * n if momentum else 0,
        activations=saved_bytes(program, batch),
    )


def saved_bytes(program: Program, batch: int) -> int:
    """The bytes that torch's autograd saves in the forward pass of a batch; a tensor saved twice counts once.

    What each layer saves stands in `foreseed.engine.parts`; nothing is saved before the first layer with parameters.
    The loss saves the log-probabilities, the labels (64 bits each) and its total weight (one number).
    """
    tensors: set[_Tensor] = set()
    saved: list[Saved] = []

    def make(stage: Stage, x: list[_Tensor]) -> _Tensor:
        trained = bool(stage.part.parameters(stage.op, stage.shape)) or any(tensor.trained for tensor in x)
        made = _Tensor(prod(stage.made), trained)
        if trained:
            saved.append(stage.part.saved(stage.op, stage.shape, stage.made))
            tensors.update(_needed(x) if saved[-1].input else [], [made] if saved[-1].output else [])
        return made

    run(program.places, _Tensor(program.image_bytes, trained=False), make)
    of_image = _FLOAT * sum(tensor.size for tensor in tensors) + sum(part.image_bytes for part in saved)
    loss: int = _FLOAT * (batch * program.classes + 1) + _INT64 * batch
    return batch * of_image + sum(part.batch_bytes for part in saved) + loss


def _needed(x: list[_Tensor]) -> list[_Tensor]:
    """Of two factors one is saved for the gradient of the other, if that has one."""
    if len(x) == 1:
        return x
    return [a for a, b in (x, reversed(x)) if b.trained]


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of one image, also one between the parts of an op."""

    size: int
    trained: bool
    """Whether it depends on parameters."""

"""A model's parameters as the values of its program: read, written, and their gradients."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foreseed.engine.errors import ProgramError, ValuesError
from foreseed.engine.program import Program
from foreseed.engine.types import Buffer
from foreseed.models.fusion import lower
from foreseed.models.layers import Step

Live = Sequence[int] | None
"""The live weights of a conv in ascending order; None = all of them, or not a conv."""


def restore(model: nn.Module, program: Program, values: Buffer, stats: Buffer | None = None) -> None:
    """Write values (and statistics) into the model that their program was compiled from, pruned weights as 0."""
    bind(model, program).write(values, stats)


def stats(model: nn.Module, program: Program) -> array[float]:
    """The running means and variances of a model's batch norms, in the order of its program."""
    return bind(model, program).stats()


def bind(model: nn.Module, program: Program) -> Binding:
    """Lay a program's values over the parameters of the model it was compiled from.

    Bind once where values come and go often: the model is traced here, and not again in `Binding.write`.
    """
    steps = lower(model, program.input_shape)
    # Compared as bytes, since a decoded eps has been rounded to float32; which weights live, the program knows alone.
    theirs = [replace(op, rice=op.owner or 0, n_weights=0).encode() for op in program.ops]
    if [step.op.encode() for step in steps] != theirs:
        raise ProgramError(
            f"the program ({len(theirs)} ops, {program.n_live} values) was not compiled from this "
            f"{type(model).__name__} ({len(steps)} ops); give the model that it was compiled from"
        )
    live: list[Live] = [None] * len(steps)
    for i, indices in program.live():
        live[i] = None if isinstance(indices, range) else indices
    return attach(program, steps, live)


def attach(program: Program, steps: Sequence[Step], live: Sequence[Live]) -> Binding:
    """The binding of a program to the modules of its steps."""
    slots, statistics = [], []
    for place, step, indices in zip(program.places, steps, live, strict=True):
        for name in place.parameters:
            kept = None if indices is None or name != "weight" else torch.tensor(indices, dtype=torch.int64)
            slots.append(_Slot(getattr(step.module, name), kept))
        statistics += [getattr(step.module, name) for name in place.statistics]
    return Binding(program, slots, statistics)


@dataclass(frozen=True)
class _Slot:
    """A run of the values: a parameter, or the live part of a weight."""

    parameter: nn.Parameter
    live: Tensor | None

    @property
    def size(self) -> int:
        return self.parameter.numel() if self.live is None else self.live.numel()

    def pick(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().cpu().reshape(-1)
        return flat if self.live is None else flat[self.live]

    def put(self, numbers: Tensor) -> None:
        if self.live is not None:
            numbers = torch.zeros(self.parameter.numel()).index_copy_(0, self.live, numbers)
        self.parameter.copy_(numbers.view(self.parameter.shape))


class Binding:
    """A model's parameters and statistics, read and written as the vectors of its program."""

    def __init__(self, program: Program, slots: Sequence[_Slot], statistics: Sequence[Any]) -> None:
        self.program = program
        self._slots = slots
        self._statistics: Sequence[Tensor] = statistics

    def read(self) -> array[float]:
        """The model's parameters as values."""
        return _floats([slot.pick(slot.parameter) for slot in self._slots])

    def gradient(self) -> array[float]:
        """The model's gradients (0 where it has none) in the order of the values."""
        grads = [(slot, slot.parameter.grad) for slot in self._slots]
        return _floats([torch.zeros(slot.size) if grad is None else slot.pick(grad) for slot, grad in grads])

    def gradients(self, grads: Mapping[Tensor, Tensor]) -> Tensor:
        """Several gradients [gradient, value] from those of every parameter [gradient, its flat numbers]."""
        rows = [(grads[slot.parameter].flatten(1), slot.live) for slot in self._slots]
        return torch.cat([row if live is None else row[:, live] for row, live in rows], 1)

    def stats(self) -> array[float]:
        """The running means and variances of the batch norms."""
        return _floats([tensor.detach().cpu() for tensor in self._statistics])

    @torch.no_grad()
    def write(self, values: Buffer, stats: Buffer | None = None) -> None:
        """Set the model's parameters, its pruned weights to 0, and its batch-norm statistics if they are given."""
        numbers = _tensor(values, self.program.n_live, "values")
        statistics = None if stats is None else _tensor(stats, self.program.n_stats, "statistics")
        for slot, part in zip(self._slots, _cut(numbers, [slot.size for slot in self._slots]), strict=True):
            slot.put(part)
        if statistics is not None:
            sizes = [tensor.numel() for tensor in self._statistics]
            for tensor, part in zip(self._statistics, _cut(statistics, sizes), strict=True):
                tensor.copy_(part)


def _floats(parts: Sequence[Tensor]) -> array[float]:
    return array("f", torch.cat([torch.empty(0), *parts]).numpy().tobytes())


def _cut(numbers: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    first = 0
    for size in sizes:
        yield numbers[first : first + size]
        first += size


def _tensor(numbers: Buffer, n: int, what: str) -> Tensor:
    raw = bytearray(memoryview(numbers).cast("B"))
    if len(raw) != 4 * n:
        raise ValuesError(
            f"{what}: {len(raw)} bytes given, expected {4 * n} ({n} float32 numbers); take the program's own"
        )
    return torch.frombuffer(raw, dtype=torch.float32) if n else torch.empty(0)

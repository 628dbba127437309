"""The one walk over a program: its ops in order, with what they read, make, hold and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

from foreseed.engine.errors import ProgramError
from foreseed.engine.ops import Kind, Op, Shape
from foreseed.engine.parts import ACTS, KINDS, POOLS, Part

_T = TypeVar("_T")


class Stage(NamedTuple):
    """A part where it stands in a program: the number of its op, and the shapes of what it reads (first) and makes."""

    part: Part
    op: Op
    number: int
    shape: Shape
    made: Shape

    @property
    def owner(self) -> int:
        """The number of the op whose values it uses: its own op's, unless that shares another's."""
        return self.number if self.op.owner is None else self.op.owner


@dataclass(frozen=True)
class Layer:
    """What one op makes and costs: a row for people, and of a run's summary."""

    name: str
    kind: Kind
    shape: Shape
    """Channels, height and width of the tensor that it makes."""
    n_weights: int
    """Live weights."""
    n_dense: int
    """Weights that the layer would have unpruned."""
    n_values: int
    """Live weights, biases and norm parameters together."""
    macs: int
    """Multiply-accumulates of its live weights for one image."""
    dense_macs: int

    @property
    def density(self) -> float:
        return self.n_weights / self.n_dense if self.n_dense else 1.0


class Place(NamedTuple):
    """An op where it stands in a program."""

    layer: Layer
    op: Op
    number: int
    reads: tuple[Shape, ...]
    """The shapes of the tensors that it reads."""
    stages: tuple[Stage, ...]
    """Its parts that do something."""
    parameters: dict[str, tuple[int, ...]]
    """By a torch module's names for them, with their dense shapes, in the order of the values; those of its own."""
    statistics: dict[str, tuple[int, ...]]

    @property
    def n_stats(self) -> int:
        return sum(map(prod, self.statistics.values()))


def reads(op: Op) -> tuple[int, ...]:
    """The tensors that an op reads."""
    return (op.a, op.b)[: KINDS[op.kind].n_inputs]


def place(op: Op, shapes: Sequence[Shape], number: int = 0, name: str = "") -> Place:
    """An op that reads tensors of these shapes; ValueError if it cannot."""
    kind, shape, stages = KINDS[op.kind], shapes[0], []
    for part in (kind, ACTS[op.act], POOLS[op.pool]):
        if part.reference:
            made = part.shape(op, *shapes) if part is kind else part.shape(op, shape)
            stages.append(Stage(part, op, number, shape, made))
            shape = made
    parameters = kind.parameters(op, shapes[0])
    n_dense, n_live = prod(parameters["weight"]) if kind.prunable else 0, op.n_weights
    macs, dense_macs = (kind.macs(op, n, stages[0].made) if stages else 0 for n in (n_live, n_dense))
    if op.owner is not None:  # it computes with values that are counted where they stand
        parameters, n_dense, n_live = {}, 0, 0
    n_values = n_live - n_dense + sum(map(prod, parameters.values()))
    layer = Layer(name, op.kind, shape, n_live, n_dense, n_values, macs, dense_macs)
    return Place(layer, op, number, tuple(shapes), tuple(stages), parameters, kind.statistics(op, shapes[0]))


def walk(ops: Iterable[Op], input_shape: Shape, names: Sequence[str] = ()) -> Iterator[Place]:
    """The ops of a program one by one."""
    shapes = [input_shape]
    for i, op in enumerate(ops):
        if max(op.a, op.b) > i:
            raise ProgramError(f"op {i} reads tensor {max(op.a, op.b)}, which is made later; the program is damaged")
        name = names[i] if names else f"{op.kind.name.lower()}{i}"
        try:
            placed = place(op, [shapes[tensor] for tensor in reads(op)], i, name)
        except ValueError as error:
            raise ProgramError(f"op {i} has {error}; the program is damaged") from None
        shapes.append(placed.layer.shape)
        yield placed


def run(places: Sequence[Place], image: _T, compute: Callable[[Stage, list[_T]], _T]) -> _T:
    """What a program makes of an image, computed part by part; a tensor is let go after its last use."""
    last_use = {tensor: place.number for place in places for tensor in reads(place.op)}
    tensors = {0: image}
    for place in places:
        x = [tensors[tensor] for tensor in reads(place.op)]
        for stage in place.stages:
            x = [compute(stage, x)]
        live = {tensor: t for tensor, t in tensors.items() if last_use.get(tensor, 0) > place.number}
        tensors = live | {place.number + 1: x[0]}
    return x[0]

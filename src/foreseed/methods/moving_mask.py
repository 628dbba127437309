"""Sparse methods whose mask moves during training: all weights as one vector, and a mask of the same length.

Devices of these methods backpropagate through dense tensors (`foreseed.methods.backprop`), so a weight that is pruned
still has its place in the vector, and may come back. The program follows from the mask: it is what is tested and saved,
and what costs are counted by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreseed.engine import ForeseedError, Program
from foreseed.engine.parts import KINDS
from foreseed.engine.program import assemble
from foreseed.meter import Work
from foreseed.methods.averaging import moving_average
from foreseed.methods.protocol import Vector
from foreseed.methods.task import Task

Live = npt.NDArray[np.bool_]
"""Of every value whether it lives; biases and norm parameters always do."""


class Layer(NamedTuple):
    """The weight of a layer that may be pruned, where it lies among all values."""

    name: str
    at: slice
    shape: tuple[int, ...]
    op: int
    macs_per_weight: float
    """Multiply-accumulates of one weight for one image."""

    @property
    def size(self) -> int:
        return prod(self.shape)


class Layout:
    """Where the weights of a dense program lie in its values, and the program of any mask of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        macs: dict[int, int] = {}
        for place in program.places:
            owner = place.number if place.op.owner is None else place.op.owner
            macs[owner] = macs.get(owner, 0) + place.layer.dense_macs
        self.layers: list[Layer] = []
        first = 0
        for place in program.places:
            for name, shape in place.parameters.items():
                size = prod(shape)
                if name == "weight" and KINDS[place.op.kind].prunable:
                    at = slice(first, first + size)
                    self.layers.append(Layer(place.layer.name, at, shape, place.number, macs[place.number] / size))
                first += size
        self.n = first
        """Values of the dense program."""
        self.n_weights = sum(layer.size for layer in self.layers)
        """Those that may be pruned."""

    @cached_property
    def everything(self) -> Live:
        """The mask that prunes nothing."""
        return np.ones(self.n, bool)

    def density(self, live: Live) -> float:
        """The share of prunable weights that live."""
        return sum(int(live[layer.at].sum()) for layer in self.layers) / self.n_weights

    def pruned(self, live: Live) -> Program:
        """The program of a mask; its values are those of the dense one where the mask is true, in their order."""
        dense = self.program
        kept: list[list[int] | None] = [None] * len(dense.ops)
        for layer in self.layers:
            indices = np.flatnonzero(live[layer.at])
            if not len(indices):
                raise ForeseedError(f"no weight of {layer.name} is left, so nothing passes; raise prune.density")
            kept[layer.op] = indices.tolist()
        names = [layer.name for layer in dense.layers()]
        return assemble(dense.input_shape, dense.classes, dense.scale, dense.shift, dense.ops, kept, names)

    def macs(self, live: Live) -> int:
        """Multiply-accumulates of a mask's weights for one image's forward pass."""
        fixed = self.program.macs - sum(round(layer.macs_per_weight * layer.size) for layer in self.layers)
        return fixed + sum(round(layer.macs_per_weight * int(live[layer.at].sum())) for layer in self.layers)

    def work(self, live: Live, passes: float) -> Work:
        """What so many forward passes of one image take under a mask (a backward pass counts as two)."""
        count = round(passes)
        return Work(count, 2 * round(passes * self.macs(live)), 2 * round(passes * self.program.dense_macs))

    @property
    def mask_bytes(self) -> int:
        """A mask on the wire: a bit for each weight that may be pruned."""
        return (self.n_weights + 7) // 8

    def value_bytes(self, live: Live) -> int:
        """Values on the wire: four bytes for each that lives, and batch-norm statistics."""
        return 4 * (int(live.sum()) + self.program.n_stats)


@dataclass
class State:
    """What goes from round to round."""

    program: Program
    """Of the mask as it is."""
    weights: Vector
    """All values, the pruned ones 0."""
    live: Live
    stats: Vector
    average: Vector | None
    """The weights' moving average, for evaluation only."""
    held: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The version of the mask that each device was last sent; -1 for none."""
    version: int = 0
    """Masks before the one in force."""
    done: int = 0
    """Rounds so far."""

    @property
    def values(self) -> Vector:
        return self.weights[self.live]

    @property
    def ema(self) -> Vector | None:
        return None if self.average is None else self.average[self.live]

    def send(self, devices: Sequence[int]) -> int:
        """Note that these devices get the mask in force; how many of them had another."""
        stale = int((self.held[devices] != self.version).sum())
        self.held[devices] = self.version
        return stale

    def move(self, layout: Layout, weights: Vector, live: Live, ema: float) -> None:
        """Take other weights and another mask."""
        if not np.array_equal(live, self.live):
            self.program, self.live = layout.pruned(live), live.copy()
            self.version += 1
        self.weights = np.where(live, weights, np.float32(0))
        self.average = moving_average(self.average, self.weights, ema)


def start(task: Task, layout: Layout, live: Live, known: bool = True) -> State:
    """The task's own initial weights under a mask, which devices find by themselves if it is `known`."""
    weights = np.where(live, task.values, np.float32(0))
    average = weights.copy() if task.config.train.ema else None
    held = np.full(task.config.data.devices, 0 if known else -1, np.int64)
    return State(layout.pruned(live), weights, live.copy(), task.stats, average, held)


def masked_mean(locals: Iterable[tuple[float, Vector, Live]], otherwise: Vector) -> Vector:
    """Of each weight the mean over the devices whose mask has it, weighted; `otherwise` where no device has it."""
    total, weighted = np.zeros(len(otherwise)), np.zeros(len(otherwise))
    for weight, values, live in locals:
        weighted += weight * np.where(live, values, 0).astype(np.float64)
        total += weight * live
    held = total > 0
    return np.where(held, weighted / np.where(held, total, 1), otherwise).astype(np.float32)


def largest(scores: npt.NDArray[np.floating], keep: int, among: Live | None = None) -> Live:
    """Marks the `keep` largest of the scores (`among` some of them); of equal ones the first."""
    places = np.arange(len(scores)) if among is None else np.flatnonzero(among)
    order = places[np.argsort(-scores[places], kind="stable")]
    chosen = np.zeros(len(scores), bool)
    chosen[order[:keep]] = True
    return chosen


def layers_kept(layout: Layout, scores: Vector, counts: Sequence[int]) -> Live:
    """The mask that keeps so many weights of each layer, those of the largest scores, and everything else."""
    live = layout.everything.copy()
    for layer, keep in zip(layout.layers, counts, strict=True):
        live[layer.at] = largest(scores[layer.at], keep)
    return live

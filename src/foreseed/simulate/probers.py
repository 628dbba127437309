"""Simulated devices that probe minibatches: by finite differences, as a device would, or in their limit."""

from __future__ import annotations

from math import fsum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreseed.engine import Directions, Engine, Samples, project
from foreseed.methods.backprop import LocalTrainer
from foreseed.methods.protocol import Vector
from foreseed.methods.task import Bytes

Rows = npt.NDArray[np.integer]
Slopes = tuple[npt.NDArray[np.float64], float]


class EngineProber(NamedTuple):
    """Finite differences by the engine."""

    device: int
    records: Bytes
    engine: Engine

    @property
    def samples(self) -> int:
        return len(self.records)

    def slopes(self, values: Vector, rows: Rows, directions: Directions, central: bool) -> Slopes:
        d = directions
        samples = Samples.records(self.records[rows], self.records.shape[1] - 1)
        there = np.array(self.engine.probe(values, samples, d))
        if central:
            other_way = Directions(d.seed, d.round, d.device, d.count, d.first, d.step, d.kind, -d.sigma)
            back = np.array(self.engine.probe(values, samples, other_way))
            slopes, loss = (there - back) / (2 * d.sigma), fsum([*there, *back]) / (2 * d.count)
        else:
            loss = self.engine.loss(values, samples)[0]
            slopes = (there - loss) / d.sigma
        return slopes / len(rows), loss / len(rows)


class ExactProber(NamedTuple):
    """The limit of short steps, by backpropagation."""

    device: int
    images: Bytes
    labels: Bytes
    trainer: LocalTrainer

    @property
    def samples(self) -> int:
        return len(self.labels)

    def slopes(self, values: Vector, rows: Rows, directions: Directions, central: bool) -> Slopes:
        (gradient,), loss = self.trainer.gradient(values, self.images[rows], self.labels[rows], [(0, len(rows))])
        return np.array(project(directions, gradient)), loss

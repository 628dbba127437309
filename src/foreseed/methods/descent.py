"""From the estimates of a round's devices to a step: what is remembered, how noisy it is, how long a step may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt

import numpy as np

from foreseed.config import Config
from foreseed.coordinator import Optimiser
from foreseed.coordinator.sums import Doubles, added, dots, square
from foreseed.engine import ForeseedError
from foreseed.engine.update import apply_step
from foreseed.methods.agreement import Agreement
from foreseed.methods.memory import Memory
from foreseed.methods.noise import Noise
from foreseed.methods.protocol import Vector
from foreseed.methods.task import Task


class NotFiniteError(ForeseedError):
    """The update would make values that are not finite; the state before it is kept."""


@dataclass
class Descent:
    """What the server knows of estimates beyond the round; a checkpoint keeps it."""

    noise: Noise
    memory: Memory | None = None
    agreement: Agreement | None = None
    """Of devices that have directions of their own; a robust rule asks for it."""

    @staticmethod
    def of(task: Task) -> Descent:
        """At the start of a run."""
        t, data, sizes = task.config.train, task.config.data, task.program.tensor_sizes()
        memory = Memory.of(data.devices, data.per_round, sizes, t.memory_bytes) if t.memory else None
        return Descent(Noise.of(sizes), memory, Agreement.of(data.devices))

    def combine(
        self, round: int, devices: Sequence[int], counts: Doubles, halves: Vector
    ) -> tuple[Vector, float | None]:
        """The sum of the devices' parts and its signal-to-noise ratio, before the memory corrects it.

        `halves` [device, half, coordinate] are two estimates of each device, each times half its share of the samples
        `counts`; or a single one, which nothing is known of.
        """
        sums, snr = halves.sum(axis=0, dtype=np.float64), None  # of many numbers each: devices in order, as `added`
        taken = added(sums)
        if len(sums) == 2:
            snr = self.noise.measure(*sums)
        if self.memory is not None:
            weights, parts = counts / fsum(counts), halves.sum(axis=1, dtype=np.float64)
            estimates = list(parts / weights[:, None])
            corrected = self.memory.corrected(devices, estimates, weights)
            self.memory.remember(round, devices, estimates, counts, self.noise.signal_share)
            taken = added(weight * estimate for weight, estimate in zip(weights, corrected, strict=True))
        return taken.astype(np.float32), snr

    @property
    def remembered(self) -> float | None:
        """How much of what is remembered counts; None without a memory."""
        return None if self.memory is None else self.memory.share


def optimiser_of(config: Config) -> Optimiser:
    """The server's optimiser."""
    t = config.train
    cosine = config.rounds if t.schedule == "cosine" else 0
    return Optimiser(
        t.optimiser, t.lr, t.momentum, t.weight_decay, t.lr_decay, t.warmup, cosine, t.nesterov, t.restarts
    )  # fmt: skip


def norm(gradient: Vector) -> float:
    """The length of a gradient, the same everywhere."""
    return sqrt(square(gradient))


def restarted(optimiser: Optimiser, gradient: Vector, buffers: Sequence[Vector]) -> bool:
    """Whether the momentum starts anew: the estimate points against it."""
    if not (optimiser.restarts and optimiser.kind == "sgd" and buffers):
        return False
    along = dots(gradient.astype(np.float64), buffers[0].astype(np.float64), np.array([len(gradient)]))
    return bool(along[0] < 0)


def step(
    values: Vector, buffers: Sequence[Vector], gradient: Vector, constants: bytes, nesterov: bool = False
) -> tuple[Vector, list[Vector]]:
    """A step of the server's optimiser; new values, and the optimiser's new vectors."""
    moved, kept = values.copy(), [buffer.copy() for buffer in buffers]
    apply_step(moved, kept, gradient, constants)
    if nesterov:  # g + mu m' in place of m', the momentum after the step, which is mu m + g
        lr, mu, _ = np.frombuffer(constants, "<f4")
        moved = values - lr * ((1 + mu) * kept[0] - mu * buffers[0])
    for buffer in kept:
        finite(buffer)
    return finite(moved), kept


def finite(values: Vector) -> Vector:
    """The values themselves, if all of them are numbers."""
    if not np.isfinite(values).all():
        raise NotFiniteError(
            "the update makes values that are not finite; lower train.lr, or set train.clip, and start anew"
        )
    return values

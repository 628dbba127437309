"""Backpropagation in torch: what a device of FedAvg does, and exact gradients for simulations.

A pruned model is trained here as a dense one whose pruned weights stay 0: torch has no faster way, and it is what a
backpropagation method really holds and computes on a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import fsum, isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreseed.draws import Draws
from foreseed.engine.errors import SamplesError, ValuesError
from foreseed.engine.program import Program
from foreseed.engine.types import Buffer
from foreseed.methods.part_tape import PartTape
from foreseed.models import bind

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.integer]
Live = npt.NDArray[np.bool_]

_CHUNK = 256
"""Images of a gradient in memory at once: more are no faster (LeNet-5 and ResNet-20 on one core)."""


class Trained(NamedTuple):
    """What local training gives back."""

    values: Vector
    loss: float
    """Mean loss of the images when their minibatch came up, over all epochs."""
    stats: Vector
    """Running statistics of the batch norms; empty without any."""


class LocalTrainer:
    """Trains one device after the other in its own copy of the torch model that a program was compiled from.

    Nothing is carried over from call to call: the same arguments give the same bits, on the same machine and torch, if
    `torch.set_num_threads` is the same (a sum split over threads is rounded otherwise); call it with 1 in workers.
    A trainer serves one thread at a time. Make one, and give each thread its `copy()`: making a trainer traces the
    model, and torch's tracer changes every model of the process while it runs.
    """

    def __init__(self, model: nn.Module, program: Program) -> None:
        # A program leaves dropout out, and so does its training: only batch norms know of training.
        self.model = copy.deepcopy(model).eval().requires_grad_(True)
        self.program = program
        self._binding = bind(self.model, program)
        self._format = _lay_out(self.model, program)
        self._masks = self._gates(np.ones(program.n_live, np.float32))
        self._norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
        self._scale, self._shift = (torch.tensor(x).view(-1, 1, 1) for x in (program.scale, program.shift))
        self._tape = PartTape.of(self.model)

    def copy(self) -> LocalTrainer:
        """A trainer for another thread."""
        return copy.deepcopy(self)

    def train(
        self,
        values: Buffer,
        images: Bytes,
        labels: Integers,
        *,
        epochs: int,
        batch: int,
        lr: float,
        momentum: float,
        weight_decay: float,
        seed: tuple[int, ...],
        stats: Buffer | None = None,
        live: Live | None = None,
        each_step: Callable[[Vector], None] | None = None,
        each_epoch: Callable[[int, Vector, Vector], Live | None] | None = None,
    ) -> Trained:
        """Minibatch SGD over all images, `epochs` times, each time shuffled anew from `seed` (run, round, device).

        The last minibatch of an epoch may be smaller. Momentum starts at 0. Batch norms start with the running
        statistics given (means 0 and variances 1 if none) and go on as torch's do.

        For methods whose masks move: values that are not `live` stay 0. `each_step` is shown the gradient of every
        minibatch, of pruned weights too; `each_epoch` an epoch's number from 1, the values, and the gradient of its
        last minibatch, and may return another mask, and write into the values before.
        """
        self._check(images, labels, [(0, len(images))])
        gates = self._masks if live is None else self._gates(live)
        self._write(values if live is None else np.where(live, values, np.float32(0)), stats, batch_statistics=True)
        parameters = list(self.model.parameters())
        velocities = [torch.zeros_like(p) for p in parameters]
        total, gradient = 0.0, np.zeros(0, np.float32)
        for epoch, rows, last in minibatches(len(images), epochs, batch, Draws(*seed, "minibatches")):
            losses = self._losses(images[rows], labels[rows])
            self._backward(losses.mean())
            if each_step is not None or (each_epoch is not None and last):
                gradient = _vector(self._binding.gradient())
            if each_step is not None:
                each_step(gradient)
            _close(gates)
            for p, v in zip(parameters, velocities, strict=True):
                if p.grad is not None:
                    _step(p, v, p.grad, lr, momentum, weight_decay)
            total += _sum(losses)
            if each_epoch is not None and last:
                now = _vector(self._binding.read())
                if (live := each_epoch(epoch, now, gradient)) is not None:
                    gates = self._gates(live)
                    self._binding.write(np.where(live, now, np.float32(0)))
                    for p, v in zip(parameters, velocities, strict=True):
                        v.mul_(gates.get(p, 1.0))
        trained, statistics = _vector(self._binding.read()), _vector(self._binding.stats())
        return Trained(trained, _finite(total / (epochs * len(images)), trained, statistics), statistics)

    def test(self, values: Buffer, images: Bytes, labels: Integers, stats: Buffer | None = None) -> tuple[float, float]:
        """Mean loss and accuracy on some images; batch norms as in `gradient`."""
        self._check(images, labels, [(0, len(images))])
        self._write(values, stats, batch_statistics=stats is None)
        total = correct = 0.0
        with torch.no_grad():
            for at in range(0, len(images), _CHUNK):
                logits, truth = self._logits(images[at : at + _CHUNK]), labels[at : at + _CHUNK].astype(np.int64)
                total += _sum(F.cross_entropy(logits, torch.from_numpy(truth), reduction="none"))
                correct += int((logits.argmax(1).numpy() == truth).sum())
        return _finite(total / len(images)), correct / len(images)

    def gradient(
        self,
        values: Buffer,
        images: Bytes,
        labels: Integers,
        parts: Sequence[tuple[int, int]],
        stats: Buffer | None = None,
    ) -> tuple[Vector, float]:
        """Gradients [len(parts), n_live] of the mean loss of each part (first image, count), and the mean over all.

        Batch norms use the statistics given, as frozen; without any, those of each chunk of up to 256 images.
        """
        self._check(images, labels, parts)
        self._write(values, stats, batch_statistics=stats is None)
        if self._tape is not None and len(parts) > 1 and max(count for _, count in parts) <= _CHUNK:
            return self._by_tape(self._tape, images, labels, parts)
        gradients = np.empty((len(parts), self.program.n_live), np.float32)
        total = 0.0
        for row, (first, count) in zip(gradients, parts, strict=True):
            self.model.zero_grad()
            for at in range(first, first + count, _CHUNK):
                chunk = slice(at, min(at + _CHUNK, first + count))
                losses = self._losses(images[chunk], labels[chunk])
                torch.autograd.backward(losses.sum() / count)
                total += _sum(losses)
            row[:] = _vector(self._binding.gradient())
        return gradients, _finite(total / sum(count for _, count in parts))

    def _by_tape(
        self, tape: PartTape, images: Bytes, labels: Integers, parts: Sequence[tuple[int, int]]
    ) -> tuple[Vector, float]:
        """`gradient` for parts that are small: neighbours share a backward pass."""
        gradients, total = [], 0.0
        for some in _together(parts):
            first, end = some[0][0], sum(some[-1])
            with tape:
                losses = self._losses(images[first:end], labels[first:end])
                grads = tape.gradients(losses, [(at - first, count) for at, count in some])
            gradients.append(self._binding.gradients(grads).numpy())
            total += _sum(losses)
        return np.concatenate(gradients), _finite(total / sum(count for _, count in parts))

    def _losses(self, images: Bytes, labels: Integers) -> Tensor:
        """The loss of every image."""
        return F.cross_entropy(self._logits(images), torch.from_numpy(labels.astype(np.int64)), reduction="none")

    def _logits(self, images: Bytes) -> Tensor:
        pixels = torch.from_numpy(images.astype(np.float32)).mul_(self._scale).add_(self._shift)
        logits: Tensor = self.model(pixels.contiguous(memory_format=self._format))
        return logits

    def _backward(self, loss: Tensor) -> None:
        self.model.zero_grad()
        torch.autograd.backward(loss)

    def _gates(self, live: Buffer) -> dict[nn.Parameter, Tensor]:
        """1 where a value lives and 0 where it does not, for every parameter that is pruned anywhere."""
        # Written as ones, the values are the mask.
        self._binding.write(np.asarray(live, np.float32))
        return {p: p.detach().clone() for p in self.model.parameters() if not p.detach().all()}

    def _write(self, values: Buffer, stats: Buffer | None, batch_statistics: bool) -> None:
        for norm in self._norms:
            norm.train(batch_statistics).reset_running_stats()
        self._binding.write(values, stats if self._norms else None)

    def _check(self, images: Bytes, labels: Integers, parts: Sequence[tuple[int, int]]) -> None:
        n, classes = len(images), self.program.classes
        if images.dtype != np.uint8 or images.shape[1:] != self.program.input_shape or labels.shape != (n,):
            raise SamplesError(
                f"{images.dtype} images {images.shape} with labels {labels.shape}: expected uint8 images of shape "
                f"{self.program.input_shape} and a label for each; give the data that the program was made for"
            )
        if not parts or any(first < 0 or count < 1 or first + count > n for first, count in parts):
            raise SamplesError(f"parts {list(parts)} of {n} images: expected parts of one image or more that are there")
        if labels.min() < 0 or labels.max() >= classes:
            raise SamplesError(
                f"labels from {labels.min()} to {labels.max()}: the program has {classes} classes, 0 to {classes - 1}; "
                "give the data that it was made for"
            )


def _together(parts: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Neighbouring parts, as many as make a chunk."""
    some: list[tuple[int, int]] = []
    for first, count in parts:
        if some and (first != sum(some[-1]) or first + count - some[0][0] > _CHUNK):
            yield some
            some = []
        some.append((first, count))
    yield some


def _close(gates: Mapping[nn.Parameter, Tensor]) -> None:
    """Gradients of pruned weights become 0, so that no step or momentum ever moves them."""
    for p, gate in gates.items():
        if p.grad is not None:
            p.grad.mul_(gate)


def _step(p: Tensor, v: Tensor, gradient: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
    """One step of SGD with momentum, to the bit as torch.optim.SGD, whose first use costs a device another 75 MB."""
    with torch.no_grad():
        v.mul_(momentum).add_(gradient.add(p, alpha=weight_decay))
        p.add_(v, alpha=-lr)


def minibatches(n: int, epochs: int, batch: int, rng: Draws) -> Iterator[tuple[int, Integers, bool]]:
    """One minibatch after the other: the epoch from 1, the image numbers, and whether it is the epoch's last."""
    for epoch in range(1, epochs + 1):
        order = rng.permutation(n)
        yield from ((epoch, order[at : at + batch], at + batch >= n) for at in range(0, n, batch))


def _lay_out(model: nn.Module, program: Program) -> torch.memory_format:
    """Put channels last where the model can take it: a sixth faster (LeNet-5 and ResNet-20 on one core)."""
    images = torch.zeros(2, *program.input_shape).contiguous(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            model(images)
    except RuntimeError:  # its forward flattens by `view`, which cannot reorder
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return torch.contiguous_format
    return torch.channels_last


def _sum(losses: Tensor) -> float:
    # torch would add in an order that depends on its build and its threads.
    return fsum(losses.detach().tolist())


def _vector(numbers: Buffer) -> Vector:
    return np.frombuffer(numbers, np.float32)


def _finite(loss: float, *vectors: Vector) -> float:
    if not (isfinite(loss) and all(np.isfinite(vector).all() for vector in vectors)):
        raise ValuesError(
            f"training came to a loss of {loss}: the values have grown too large; lower the learning rate"
        )
    return loss

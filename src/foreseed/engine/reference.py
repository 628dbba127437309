"""The engine in NumPy: what a program means, short enough to read beside `docs/format.md`.

It is the yardstick of the C engine and the fallback where that could not be built: far slower, and hungrier, since
it keeps every tensor of a batch and expands the weights of a layer to a dense block while it uses them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate as accumulated
from itertools import pairwise
from math import isfinite, prod

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from foreseed.engine.errors import BudgetError, ForeseedError, SamplesError, ValuesError
from foreseed.engine.program import Act, Kind, Op, Pool, Program, unknown
from foreseed.engine.reference_check import Shape, Window, check_program, conv_shape, n_stats, padded_shape
from foreseed.engine.reference_rng import (
    Floats,
    accumulate,
    adam,
    direction,
    floats,
    normals,
    perturb,
    philox,
    project,
    sgd,
)
from foreseed.engine.types import Buffer, Directions, Samples

__all__ = [
    "ReferenceEngine",
    "accumulate",
    "adam",
    "check_program",
    "direction",
    "normals",
    "perturb",
    "philox",
    "project",
    "sgd",
]

Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]
# What the temporaries of philox() and normals() take for each coordinate.
_BYTES_TO_DRAW = 28
_WHERE = "the NumPy reference"


class ReferenceEngine:
    """Runs a program forward over images, with its values as they are or perturbed."""

    def __init__(
        self, program: Program, batch: int = 32, directions: int = 1, memory_budget: int | None = None
    ) -> None:
        check_program(program)
        if batch < 1 or directions < 1:
            raise ForeseedError(f"batch {batch} and {directions} directions at once: expected at least 1 of each")
        self.program = program
        self._live = {i: _indices(live) for i, live in program.live()}
        self._shapes = program.shapes()
        self._values_at = _spans(layer.n_values for layer in program.layers())
        self._stats_at = _spans(n_stats(op, self._shapes[op.a]) for op in program.ops)
        fixed, an_image = _bytes_needed(program)
        if memory_budget is not None:
            if memory_budget < fixed + an_image:
                raise BudgetError(
                    f"a budget of {memory_budget} bytes: this program needs {fixed + an_image} with a batch of 1; "
                    "raise the budget or prune more",
                    needed=fixed + an_image,
                )
            batch = min(batch, (memory_budget - fixed) // an_image)
        self.batch = batch
        self.directions = directions
        self._fixed, self._an_image = fixed, an_image
        self.planned_bytes = fixed + batch * an_image
        self.observed_bytes = 0

    def loss(self, values: Buffer, samples: Samples, stats: Buffer | None = None) -> tuple[float, int]:
        """The sum of the images' cross-entropy losses, and how many of them were classified correctly."""
        images, labels = self._open_labelled(samples)
        return self._loss(self._values(values), images, labels, self._frozen(stats))

    def logits(self, values: Buffer, samples: Samples, stats: Buffer | None = None) -> array[float]:
        """The logits of every image, one row after another."""
        images, _ = self._open(samples)
        w, frozen = self._values(values), self._frozen(stats)
        rows = [self._forward(w, images[part], frozen)[0] for part in self._parts(images)]
        return array("f", np.concatenate(rows).tobytes())

    def probe(
        self, values: Buffer, samples: Samples, directions: Directions, stats: Buffer | None = None
    ) -> array[float]:
        """For each direction the loss of the values perturbed along it."""
        images, labels = self._open_labelled(samples)
        w, frozen = self._values(values), self._frozen(stats)
        return array(
            "d", [self._loss(perturb(w, directions, k), images, labels, frozen)[0] for k in directions.numbers()]
        )

    def batch_stats(self, values: Buffer, samples: Samples) -> array[float]:
        """Means and variances of the batch-norm layers: each batch's own, averaged over the images."""
        images, _ = self._open(samples)
        w = self._values(values)
        total = np.zeros(self.program.n_stats)
        for part in self._parts(images):
            total += len(images[part]) * self._forward(w, images[part], None)[1]
        return array("f", (total / len(images)).astype(np.float32).tobytes())

    def _loss(self, w: Floats, images: Bytes, labels: Bytes, frozen: Floats | None) -> tuple[float, int]:
        total, correct = 0.0, 0
        for part in self._parts(images):
            logits, _ = self._forward(w, images[part], frozen)
            with np.errstate(over="ignore", invalid="ignore"):
                shifted = logits - logits.max(axis=1, keepdims=True).astype(np.float64)
                losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(logits)), labels[part]]
            # One by one: NumPy and Python's own sum() add in other orders.
            for loss in losses.tolist():
                total += loss
            correct += int((logits.argmax(axis=1) == labels[part]).sum())
        if not isfinite(total):
            raise ValuesError(
                "the loss is not finite: the values have grown too large; lower the learning rate or sigma"
            )
        return total, correct

    @np.errstate(over="ignore", invalid="ignore")
    def _forward(self, w: Floats, images: Bytes, frozen: Floats | None) -> tuple[Floats, Doubles]:
        """The logits of a batch, and the statistics of its batch-norm layers."""
        self.observed_bytes = max(self.observed_bytes, self._fixed + len(images) * self._an_image)
        scale, shift = (np.array(x, np.float32)[:, None, None] for x in (self.program.scale, self.program.shift))
        tensors = [images.astype(np.float32) * scale + shift]
        seen = np.zeros(self.program.n_stats)
        for i, op in enumerate(self.program.ops):
            x, own = tensors[op.a], w[self._values_at[i]]
            if op.kind is Kind.CONV:
                x = _conv(x, op, self._live[i], own)
            elif op.kind is Kind.NORM and op.groups:
                x = _scaled(x, *_group_moments(x, op.groups), op, own)
            elif op.kind is Kind.NORM:
                at = self._stats_at[i]
                seen[at] = np.concatenate(_moments(x, (0, 2, 3))) if frozen is None else frozen[at]
                mean, variance = np.split(seen[at], 2)
                x = _scaled(x, mean, variance, op, own)
            elif op.kind is Kind.ADD:
                x = x + tensors[op.b]
            elif op.kind not in (Kind.POOL, Kind.ACT):
                raise unknown("op kind", op.kind, _WHERE)
            tensors.append(_pooled(_activated(x, op.act), op.pool, op.pool_window))
        return tensors[-1].reshape(len(images), -1), seen

    def _parts(self, images: Bytes) -> Iterator[slice]:
        return (slice(first, first + self.batch) for first in range(0, len(images), self.batch))

    def _values(self, values: Buffer) -> Floats:
        return _checked(values, self.program.n_live, "values")

    def _frozen(self, stats: Buffer | None) -> Floats | None:
        if stats is None:
            return None
        frozen = _checked(stats, self.program.n_stats, "statistics")
        for at in self._stats_at:
            if frozen[at][(at.stop - at.start) // 2 :].min(initial=0) < 0:
                raise ValuesError("statistics: a variance is negative; expected 0 or more, get a good copy")
        return frozen

    def _open(self, samples: Samples) -> tuple[Bytes, Bytes]:
        """Images and labels where they lie, once it is clear that all of them are there."""
        c, h, w = self.program.input_shape
        raw = np.frombuffer(samples.data, np.uint8)
        if samples.count < 1:
            raise SamplesError(f"{samples.count} samples: expected at least 1")
        last = (samples.count - 1) * samples.stride
        end = last + max(samples.image_offset + c * h * w, samples.label_offset + 1)
        if min(samples.stride, samples.image_offset, samples.label_offset) < 0 or end > len(raw):
            raise SamplesError(
                f"{samples.count} samples of {c}x{h}x{w} reach to byte {end} of {len(raw)}; "
                "check the shard, its offsets and the program's input shape"
            )
        labels = as_strided(raw[samples.label_offset :], (samples.count,), (samples.stride,), writeable=False)
        strides = (samples.stride, h * w, w, 1)
        return as_strided(raw[samples.image_offset :], (samples.count, c, h, w), strides, writeable=False), labels

    def _open_labelled(self, samples: Samples) -> tuple[Bytes, Bytes]:
        images, labels = self._open(samples)
        bad = np.flatnonzero(labels >= self.program.classes)
        if len(bad):
            raise SamplesError(
                f"sample {bad[0]} has label {labels[bad[0]]}: expected less than {self.program.classes}, "
                "the classes of the program; check the shard"
            )
        return images, labels


def _indices(live: range | array[int]) -> slice | NDArray[np.uint32]:
    # All of a dense layer's weights need no list.
    return slice(len(live)) if isinstance(live, range) else np.asarray(live, np.uint32)


def _conv(x: Floats, op: Op, live: slice | NDArray[np.uint32], own: Floats) -> Floats:
    """Every window times the dense weights of its group, in float64; rounded once, at the end."""
    kh, kw, sh, sw, ph, pw = op.window
    weights = np.zeros((op.channels, x.shape[1] // op.groups, kh, kw))
    weights.ravel()[live] = own[: op.n_weights]
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = sliding_window_view(padded, (kh, kw), axis=(2, 3))[:, :, ::sh, ::sw]
    parts = [
        np.tensordot(windows_of_group, weights_of_group, axes=((1, 4, 5), (1, 2, 3)))
        for windows_of_group, weights_of_group in zip(
            np.split(windows, op.groups, axis=1), np.split(weights, op.groups), strict=True
        )
    ]
    result = np.concatenate(parts, axis=-1)
    if op.has_parameters:
        result += own[op.n_weights :]
    return np.ascontiguousarray(result.transpose(0, 3, 1, 2), np.float32)


def _moments(x: Floats, axes: tuple[int, ...]) -> tuple[Doubles, Doubles]:
    """Mean and biased variance over some axes, from sums in float64."""
    count = prod(x.shape[axis] for axis in axes)
    mean = x.sum(axis=axes, dtype=np.float64) / count
    square = np.square(x, dtype=np.float64).sum(axis=axes) / count
    return mean, np.maximum(square - mean * mean, 0)


def _group_moments(x: Floats, groups: int) -> tuple[Doubles, Doubles]:
    """The same for every image and channel: those of its group."""
    n, c = x.shape[:2]
    mean, variance = _moments(x.reshape(n, groups, -1), (2,))
    return mean.repeat(c // groups, axis=1), variance.repeat(c // groups, axis=1)


def _scaled(x: Floats, mean: Doubles, variance: Doubles, op: Op, own: Floats) -> Floats:
    gamma, beta = np.split(own, 2) if op.has_parameters else (np.float32(1), np.float32(0))
    a = gamma / np.sqrt(variance + op.eps)
    b = beta - mean * a
    return x * a.astype(np.float32)[..., None, None] + b.astype(np.float32)[..., None, None]


def _activated(x: Floats, act: Act) -> Floats:
    if act is Act.RELU:
        return np.maximum(x, np.float32(0))
    if act is Act.HARDSWISH:
        gate: Floats = np.clip(x + np.float32(3), np.float32(0), np.float32(6))
        return x * gate * np.float32(1 / 6)
    if act is Act.NONE:
        return x
    raise unknown("activation", act, _WHERE)


def _pooled(x: Floats, pool: Pool, window: Window) -> Floats:
    if pool is Pool.NONE:
        return x
    if pool is Pool.MAX:
        highest: Floats = _windows(x, window, outside=-np.inf).max(axis=(-2, -1))
        return highest
    if pool not in (Pool.AVERAGE, Pool.AVERAGE_INSIDE):
        raise unknown("pool", pool, _WHERE)
    ones = np.ones((1, 1, *x.shape[2:]), np.float32)
    count = _sums(_windows(ones, window, outside=pool is Pool.AVERAGE))
    return _sums(_windows(x, window, outside=0)) * (np.float32(1) / count)


def _windows(x: Floats, window: Window, outside: float) -> Floats:
    kh, kw, sh, sw, ph, pw = window
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=outside)
    return sliding_window_view(padded, (kh, kw), axis=(2, 3))[:, :, ::sh, ::sw]


def _sums(windows: Floats) -> Floats:
    # In row order: np.sum would choose an order of its own, and float32 sums depend on it.
    total = np.zeros(windows.shape[:-2], np.float32)
    for i, j in np.ndindex(windows.shape[-2:]):
        total += windows[..., i, j]
    return total


def _checked(numbers: Buffer, n: int, what: str) -> Floats:
    given = memoryview(numbers).nbytes
    if given != 4 * n:
        raise ValuesError(
            f"{what}: {given} bytes given, expected {4 * n} ({n} float32 numbers); is it for this program?"
        )
    checked = floats(numbers)
    bad = np.flatnonzero(~np.isfinite(checked))
    if len(bad):
        raise ValuesError(f"{what}: number {bad[0]} is {checked[bad[0]]}; expected finite numbers, get a good copy")
    return checked


def _spans(lengths: Iterable[int]) -> list[slice]:
    """Consecutive slices of these lengths."""
    ends = list(accumulated(lengths))
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def _bytes_needed(program: Program) -> tuple[int, int]:
    """What a forward pass holds: bytes whatever the batch, and bytes for each of its images."""
    shapes, layers = program.shapes(), program.layers()
    structure = len(program.bytes) + 4 * sum(layer.n_weights for layer in layers)
    vectors = 4 * (2 * program.n_live + program.n_stats)
    # A direction is drawn before the forward pass begins, so its temporaries and the dense weights never meet.
    aside = max(_BYTES_TO_DRAW * program.n_live, *(8 * layer.n_dense for layer in layers))
    tensors = 4 * sum(prod(shape) for shape in shapes)
    work = max(_work_bytes(op, shapes[op.a], shapes[i + 1]) for i, op in enumerate(program.ops))
    return structure + vectors + aside, tensors + work


def _work_bytes(op: Op, shape: Shape, made: Shape) -> int:
    """The temporaries of one op, for one image: float64 inside a conv, float32 in activation and pool after it."""
    result = conv_shape(op, shape) if op.kind is Kind.CONV else made
    after = 16 * max(prod(shape), prod(result)) + 4 * prod(padded_shape(result, op.pool_window))
    if op.kind is not Kind.CONV:
        return after
    columns = prod(result[1:]) * (shape[0] // op.groups) * op.window[0] * op.window[1]
    inside = 8 * (prod(padded_shape(shape, op.window)) + max(prod(shape), columns)) + 20 * prod(result)
    return max(inside, after)

"""The engine in NumPy: what a program means, short enough to read beside `docs/format.md`.

It is the yardstick of the C engine and the fallback where that could not be built: far slower, and hungrier, since
it holds whole tensors of a batch and expands the weights of a layer to a dense block while it uses them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate as accumulated
from itertools import pairwise
from math import isfinite, prod

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from foreseed.engine import reference_layers
from foreseed.engine.errors import BudgetError, ForeseedError, SamplesError, ValuesError
from foreseed.engine.in_parts import differences
from foreseed.engine.parts import padded
from foreseed.engine.program import Program
from foreseed.engine.reference_check import check_program
from foreseed.engine.reference_layers import Doubles, Own
from foreseed.engine.reference_rng import Floats, floats, perturb
from foreseed.engine.types import Buffer, Directions, Samples, check_kept
from foreseed.engine.walker import Place, Stage, run

Bytes = NDArray[np.uint8]
# What the temporaries of philox() and normals() take for each coordinate.
_BYTES_TO_DRAW = 28


class Guard:
    """Where there is no C, nothing guards a mapped file: one that is cut short while it is read ends the process."""

    lost = False

    def __init__(self, mapped: Buffer) -> None: ...

    def close(self) -> None: ...


class ReferenceEngine:
    """Runs a program forward over images, with its values as they are or perturbed.

    Always by whole passes: `keep`, which saves the C engine some, changes no result, and nothing here.
    """

    def __init__(
        self,
        program: Program,
        batch: int = 32,
        directions: int = 1,
        memory_budget: int | None = None,
        *,
        keep: Sequence[int] = (),
    ) -> None:
        check_program(program)
        check_kept(keep, program.n_live)
        if batch < 1 or directions < 1:
            raise ForeseedError(f"batch {batch} and {directions} directions at once: expected at least 1 of each")
        self.program = program
        self._live = {i: _indices(live) for i, live in program.live()}
        self._values_at = _spans(layer.n_values for layer in program.layers())
        self._stats_at = _spans(place.n_stats for place in program.places)
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
        self.directions, self.keep = directions, tuple(keep)
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
        here = directions.perturbed(self.program.n_live)
        images, labels = self._open_labelled(samples)
        w, frozen = self._values(values), self._frozen(stats)
        moved, losses = w.copy(), array("d")
        for k in directions.numbers():
            moved[here] = perturb(w[here], directions, k)
            losses.append(self._loss(moved, images, labels, frozen)[0])
        return losses

    differences = differences

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
        seen = np.zeros(self.program.n_stats) if frozen is None else frozen.astype(np.float64)

        def compute(stage: Stage, tensors: list[Floats]) -> Floats:
            i = stage.owner
            live = self._live.get(i, slice(0))
            own = Own(w[self._values_at[i]], live, seen[self._stats_at[i]], frozen is not None)
            made: Floats = getattr(reference_layers, stage.part.reference)(stage.op, own, *tensors)
            return made

        logits = run(self.program.places, images.astype(np.float32) * scale + shift, compute)
        return logits.reshape(len(images), -1), seen

    def _parts(self, images: Bytes) -> Iterator[slice]:
        return (slice(first, first + self.batch) for first in range(0, len(images), self.batch))

    def _values(self, values: Buffer) -> Floats:
        return _checked(values, self.program.n_live, "values")

    def _frozen(self, stats: Buffer | None) -> Floats | None:
        if stats is None:
            return None
        frozen = _checked(stats, self.program.n_stats, "statistics")
        self.program.check_stats(frozen.tolist())
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
    layers = program.layers()
    structure = len(program.bytes) + 4 * sum(layer.n_weights for layer in layers)
    vectors = 4 * (2 * program.n_live + program.n_stats)
    # A direction is drawn before the forward pass begins, so its temporaries and the dense weights never meet.
    aside = max(_BYTES_TO_DRAW * program.n_live, *(8 * layer.n_dense for layer in layers))
    tensors = 4 * sum(prod(shape) for shape in program.shapes())
    return structure + vectors + aside, tensors + max(map(_work_bytes, program.places))


def _work_bytes(place: Place) -> int:
    """The temporaries of one op, for one image: those of its kind, or of activation and pool after it in float32."""
    shape, made = place.reads[0], place.stages[0].made if place.stages else place.layer.shape
    after = 16 * max(prod(shape), prod(made)) + 4 * prod(padded(made, place.op.pool_window))
    return max([after, *(stage.part.reference_bytes(stage.op, stage.shape, stage.made) for stage in place.stages)])

"""What a method is made of, and what it may ask of the devices: all that a new method needs to know.

A method is one file: a dataclass `State`, `init(task) -> State`, `round(task, devices, state) -> RoundResult`, and
`enter(Method(...))`, which makes its name known. A run (`foreseed.runs`) calls `round` until all rounds are done, and
tests, saves and resumes by what stands here. Devices are simulated (`foreseed.simulate`) or real (`foreseed.fleet`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from foreseed.coordinator import Coordinator
from foreseed.engine import Directions, Program
from foreseed.meter import Work

if TYPE_CHECKING:
    from foreseed.methods.backprop import LocalTrainer

Vector = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")


class State(Protocol):
    """What goes from round to round: a dataclass of arrays, numbers, bytes, programs, lists and dataclasses of them.

    That is all a checkpoint needs to know (`foreseed.runs.checkpoint`). A field with `metadata=UNSAVED` is left out and
    is as `init` made it when a run is resumed. The program is part of it, so a mask may change from round to round.
    """

    @property
    def program(self) -> Program: ...
    @property
    def values(self) -> Vector: ...
    @property
    def stats(self) -> Vector:
        """Batch-norm statistics; empty without any."""

    @property
    def ema(self) -> Vector | None:
        """The moving average of the values, for evaluation only."""


@runtime_checkable
class KeepsFiles(Protocol):
    """A state, or a part of one, with more to keep than a checkpoint should hold each round."""

    def keep_in(self, folder: Path) -> None:
        """Called once, before the first round and after a checkpoint was restored: files of its own lie here."""


UNSAVED = {"saved": False}
"""Metadata of a state's field that no checkpoint holds."""


class Traffic(NamedTuple):
    """What went over the wire for one round."""

    bytes_up: int
    bytes_down: int
    measured: Mapping[str, Any] = {}
    """What only real devices know (`foreseed.runs.records.Row` names it)."""


@dataclass(frozen=True)
class RoundResult:
    """What a round did and cost, all devices together."""

    round: int
    lr: float
    train_loss: float
    """Mean loss of the devices' images, before the step."""
    participants: Sequence[int]
    samples: int
    work: Work
    traffic: Traffic
    snr: float | None = None
    """Signal-to-noise ratio of the round's estimate; None where nothing tells."""
    remembered: float | None = None
    """How much of devices' earlier estimates counts, from 0 to 1; None without a memory."""
    left_out: Sequence[int] = ()
    """Participants that do not count: they have pulled against all others for many rounds."""
    personal_accuracy: float | None = None
    """Mean over the participants of the accuracy of a model of their own on their own held-out images."""
    personal_density: float | None = None
    """Mean share of weights that live in those models."""


@dataclass(frozen=True)
class Job:
    """Local training by backpropagation, on each of some devices."""

    round: int
    devices: Sequence[int]
    program: Program
    values: Vector
    stats: Vector
    lr: float


class LocalResult(NamedTuple):
    """What one device comes back with."""

    samples: int
    values: Vector
    """Or the gradient."""
    stats: Vector
    loss: float
    """Mean loss of its images when their minibatch came up."""


class Local(NamedTuple):
    """A device at work: what it holds, and what it computes with."""

    device: int
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]
    trainer: LocalTrainer


class Prober(Protocol):
    """A device at work by forward passes alone, on a few of its images at a time."""

    @property
    def device(self) -> int: ...
    @property
    def samples(self) -> int:
        """How many images it has."""

    def slopes(
        self, values: Vector, rows: npt.NDArray[np.integer], directions: Directions, central: bool
    ) -> tuple[npt.NDArray[np.float64], float]:
        """How the mean loss of the images `rows` changes along each direction, by its length, and that loss."""


class Devices(Protocol):
    """Whoever does the work: simulated devices, or real ones."""

    def ask(self, coordinator: Coordinator, program: Program) -> Traffic:
        """Open the coordinator's round, have its devices answer with this program, and let it receive their replies."""

    def train(self, job: Job) -> Iterator[LocalResult]:
        """Backpropagation on the job's devices, one result after the other in their order."""

    def gradients(self, job: Job) -> Iterator[LocalResult]:
        """The exact gradient of each device's mean loss, in place of values that were trained."""

    def visit(self, program: Program, devices: Sequence[int], work: Callable[[Local], R]) -> Iterator[R]:
        """A method's own work by backpropagation through this program, on some devices, in their order.

        It may be done on another machine, and twice: what it returns counts, and what it changes is lost.
        """

    def probe(self, program: Program, devices: Sequence[int], work: Callable[[Prober], R]) -> Iterator[R]:
        """A method's own work by forward passes of this program, on some devices, in their order; as in `visit`."""

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Results in the order of the items; the work is shared out over the cores."""

    def evaluate(self, program: Program, values: Vector, stats: Vector) -> tuple[float, float]:
        """Accuracy and mean loss on the test images."""

    def digests(self) -> dict[str, str]:
        """All of the devices that decides a run, part by part; nothing where devices hold what nobody else knows."""

    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples of each device that is known, in the order of their numbers."""

    def costs(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The run is over: what real devices took beyond the payload."""

    def close(self) -> None: ...

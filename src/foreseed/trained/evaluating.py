"""How good a trained model is on labelled images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path

import numpy as np

from foreseed.data import SETS, DataError, HeldOut, class_folders, list_pictures, load_held_out, read_pictures
from foreseed.engine import Engine, Samples
from foreseed.trained.model import Bytes, Trained

_BATCH = 32


@dataclass(frozen=True)
class Score:
    """Of the images of one class."""

    images: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on a data set."""

    data: str
    images: int
    accuracy: float
    loss: float
    """Mean cross-entropy, in nats."""
    classes: dict[str, Score]
    """By the name of the class; one that has no images here is left out."""


def evaluate(trained: Trained, data: str = "") -> Evaluation:
    """Test a model: on the test images of its own run, or of another data set that `foreseed.data.load` knows.

    A folder with a sub-folder for each class, and no test/ in it, is taken whole, unless it is the run's own: then it
    is the part that the run set aside for testing. Classes are matched by their names, those of an .npz by number.
    """
    name = data or trained.config.data.set
    images, labels = _labelled(trained, name)
    trained.check_images(images)
    engine, scores, right = Engine(trained.program, batch=_BATCH), {}, 0
    losses: list[float] = []
    for label, class_name in enumerate(trained.classes):
        some = images[labels == label]
        if not len(some):
            continue
        records = np.pad(some.reshape(len(some), -1), ((0, 0), (1, 0)), constant_values=label)
        loss, correct = engine.loss(
            trained.values, Samples.records(records, trained.program.image_bytes), trained.frozen
        )
        scores[class_name] = Score(len(some), correct / len(some), loss / len(some))
        right += correct
        losses.append(loss)
    # fsum: the built-in sum of floats rounds differently from one Python version to the next.
    return Evaluation(name, len(images), right / len(images), fsum(losses) / len(images), scores)


def _labelled(trained: Trained, name: str) -> tuple[Bytes, Bytes]:
    """Images, and labels as the model numbers them."""
    config, path = trained.config.data, Path(name).expanduser()
    is_own = name == config.set or (path.exists() and path.resolve() == Path(config.set).expanduser().resolve())
    if is_own or name in SETS or not path.is_dir():
        held = load_held_out(*config.source) if is_own else load_held_out(name, config.root or None)
        return held.images, _renumbered(trained, name, held)
    folder = path / "test" if (path / "test").is_dir() else path
    classes = class_folders(folder)
    numbers = _numbers(trained, name, classes)
    files, labels = list_pictures(folder, classes)
    return read_pictures(files, trained.program.input_shape), numbers[labels]


def _renumbered(trained: Trained, name: str, held: HeldOut) -> Bytes:
    if held.classes == trained.classes:
        return held.labels
    if Path(name).expanduser().is_file():
        if held.labels.max() >= len(trained.classes):
            raise DataError(
                f"{name}: a label is {held.labels.max()}, the model has {len(trained.classes)} classes, from 0; "
                "give data of the same classes"
            )
        return held.labels
    return _numbers(trained, name, held.classes)[held.labels]


def _numbers(trained: Trained, name: str, classes: Sequence[str]) -> Bytes:
    """The model's label of each class."""
    if unknown := [one for one in classes if one not in trained.classes]:
        raise DataError(
            f"{name}: the model knows no class {unknown[0]!r}, only {', '.join(trained.classes)}; "
            "name the class folders as in training"
        )
    return np.array([trained.classes.index(one) for one in classes], np.uint8)

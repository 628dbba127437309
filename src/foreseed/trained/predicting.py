"""What a trained model says of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foreseed.data import DataError, image_paths, read_pictures
from foreseed.trained.model import Bytes, Trained

_TOGETHER = 1000


class Prediction(NamedTuple):
    """The class that a model finds most likely, and how likely it finds each."""

    label: int
    name: str
    probability: float
    probabilities: dict[str, float]


def predict(trained: Trained, images: Bytes) -> list[Prediction]:
    """What the model says of uint8 images [N, channels, height, width]; it normalises them as it was trained."""
    logits = trained.logits(images).astype(np.float64)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares = powers / powers.sum(1, keepdims=True)
    labels = logits.argmax(1).tolist()
    return [
        Prediction(label, trained.classes[label], row[label], dict(zip(trained.classes, row, strict=True)))
        for label, row in zip(labels, shares.tolist(), strict=True)
    ]


def predict_files(trained: Trained, files: Sequence[Path]) -> list[Prediction]:
    """The same for image files, which are brought to the model's shape."""
    found: list[Prediction] = []
    for first in range(0, len(files), _TOGETHER):  # all at once could be more than memory holds
        chunk = files[first : first + _TOGETHER]
        found += predict(trained, read_pictures(chunk, trained.program.input_shape))
    return found


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are given, and the images of folders, at any depth, by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = image_paths(path.rglob("*"))
            if not inside:
                raise DataError(f"{path} has no PNG or JPEG files; name a folder with images, or the images")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: there is no such file or folder; check the path")
    return files

"""A small world for the tests of backpropagation: digit-like images, and models to learn them."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreseed import models
from foreseed.engine.program import Program
from tests.models.agreement import random_mask

SHAPE = (1, 16, 16)
CLASSES = 4


def digits(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of bars, a class for each place of the bar, with noise; one after the other in random order."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, n)
    images = rng.integers(0, 60, (n, *SHAPE))
    for image, label in zip(images, labels, strict=True):
        image[0, :, 4 * label : 4 * label + 3] += 150
    return images.astype(np.uint8), labels


def lenet() -> nn.Module:
    return models.build("lenet5", SHAPE, CLASSES, activation="hardswish", seed=1)


def with_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    body = (nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(4, CLASSES))


def pruned(model: nn.Module, density: float) -> tuple[Program, np.ndarray]:
    mask = None if density == 1 else random_mask(model, density)
    program, values = models.compile(model, mask, input_shape=SHAPE, mean=(0.4,), std=(0.3,))
    return program, np.array(values, np.float32)


def plain_losses(model: nn.Module, program: Program, images: np.ndarray, labels: np.ndarray) -> Tensor:
    """The loss of every image, written as any torch user would."""
    x = torch.from_numpy(images.copy()).float() * program.scale[0] + program.shift[0]
    return F.cross_entropy(model(x), torch.from_numpy(labels.astype(np.int64)), reduction="none")


def live_of(model: nn.Module, program: Program) -> dict[str, Tensor]:
    """1 for every live entry of every parameter, 0 for every pruned one."""
    ones = copy.deepcopy(model)
    models.restore(ones, program, np.ones(program.n_live, np.float32))
    return {name: p.detach() for name, p in ones.named_parameters()}

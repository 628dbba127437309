"""What is learnt: model, mask, program, initial values and test images. Equal configs make equal tasks, to the bit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foreseed.config import Config, ConfigError
from foreseed.data import HeldOut
from foreseed.engine import Program
from foreseed.models import build, compile, load_weights, stats
from foreseed.prune import PRUNERS, PruneResult, Step, apply_mask, foresight, rescale

Bytes = npt.NDArray[np.uint8]
Vector = npt.NDArray[np.float32]
DeviceImages = Callable[[Config], Sequence[tuple[Bytes, Bytes]]]
"""Gives images and labels, device by device."""


@dataclass(frozen=True, eq=False)
class Task:
    """All that a server needs to train: not a single training image is in it."""

    config: Config
    test: Bytes
    """The test images: a label byte and the pixels in each row."""
    model: nn.Module
    """The torch model with its initial weights, pruned."""
    program: Program
    values: Vector
    stats: Vector
    pruning: PruneResult | None
    pruning_seconds: float
    classes: tuple[str, ...]
    """Their names, by label."""
    weights: str = ""
    """The digest of the file of weights that it starts from; "" if they were drawn."""

    def digests(self) -> dict[str, str]:
        """All that decides a run beside its config and its devices, part by part."""
        mask = {} if self.pruning is None else self.pruning.mask
        return {
            "test data": digest([self.test]),
            **({"model.weights": self.weights} if self.weights else {}),
            "mask": digest(live.numpy() for live in mask.values()),
            "initial values": digest([np.frombuffer(self.program.bytes, np.uint8), self.values, self.stats]),
        }


def make_task(
    config: Config,
    tests: HeldOut,
    progress: Callable[[Step], None] | None = None,
    device_images: DeviceImages | None = None,
) -> Task:
    """Build, prune and compile, as the config says; `device_images` is what pruners such as NTK-Ori ask of devices."""
    model = build(
        config.model.name, tests.shape, len(tests.classes),
        activation=config.model.activation, norm=config.model.norm, init=config.model.init, seed=config.seed,
    )  # fmt: skip
    weights = ""
    if config.model.weights:
        load_weights(model, config.model.weights)
        weights = digest(tensor.numpy() for tensor in model.state_dict().values())
    began = time.perf_counter()
    pruning = _prune(config, tests, model, progress, device_images)
    seconds = time.perf_counter() - began
    if pruning is not None:
        # Scaling is for draws, whose sum shrinks as they are pruned; what was learnt is kept as it is.
        scales = config.prune.rescale and not config.model.weights
        model = (rescale if scales else apply_mask)(model, pruning.mask)
    program, values = compile(
        model, None if pruning is None else pruning.mask, input_shape=tests.shape, mean=tests.mean, std=tests.std
    )
    return Task(
        config, records(tests.images, tests.labels), model, program, np.array(values, np.float32),
        np.array(stats(model, program), np.float32), pruning, seconds, tests.classes, weights,
    )  # fmt: skip


def records(images: Bytes, labels: Bytes) -> Bytes:
    """Images and labels as a shard lays them out."""
    return np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1)


def digest(arrays: Iterable[npt.NDArray[np.generic]]) -> str:
    """The name of some arrays: the same for equal ones, and for no others."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _prune(
    config: Config,
    tests: HeldOut,
    model: nn.Module,
    progress: Callable[[Step], None] | None,
    device_images: DeviceImages | None,
) -> PruneResult | None:
    if config.effective_density == 1:
        return None
    p, images, labels = config.prune, None, None
    if PRUNERS[p.pruner].asks != "nothing":
        if device_images is None:
            raise ConfigError(
                f"prune.pruner {p.pruner} makes devices backpropagate, which real ones cannot; use ntk-rand"
            )
        theirs = device_images(config)
        images = [_normalised(tests, some) for some, _ in theirs]
        labels = [torch.from_numpy(classes.astype(np.int64)) for _, classes in theirs]
    return foresight(
        model, config.effective_density, pruner=p.pruner, input_shape=tests.shape, iterations=p.iterations,
        redraws=p.redraws, redraw_weights=p.redraw_weights and not config.model.weights, batch=p.batch,
        epsilon=p.epsilon, seed=config.seed, device_data=images, device_labels=labels,
        cost_power=p.cost_power if p.cost == "flops" else 0.0, progress=progress,
    )  # fmt: skip


def _normalised(tests: HeldOut, images: Bytes) -> torch.Tensor:
    """Images as the network sees them."""
    pixels = torch.from_numpy(np.ascontiguousarray(images)).float() / 255
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (tests.mean, tests.std))
    return (pixels - mean) / std

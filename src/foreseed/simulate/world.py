"""The world of a run: data, partition, model, mask, program. Equal configs make equal worlds, to the bit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foreseed.config import Config
from foreseed.data import Dataset, Partition
from foreseed.draws import Draws
from foreseed.engine import Program, Samples
from foreseed.engine.types import Buffer
from foreseed.models import build, compile, stats
from foreseed.prune import PruneResult, Step, apply_mask, foresight, rescale
from foreseed.simulate.shares import share_out

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class World:
    """All that a run starts from."""

    config: Config
    data: Dataset
    partition: Partition
    records: Bytes
    """Every device's shard, one after the other: a label byte and the pixels in each row."""
    test: Bytes
    starts: npt.NDArray[np.int64]
    """The first row of each device; one more at the end."""
    model: nn.Module
    """The torch model with its initial weights, pruned."""
    program: Program
    values: npt.NDArray[np.float32]
    stats: npt.NDArray[np.float32]
    pruning: PruneResult | None
    pruning_seconds: float

    def digests(self) -> dict[str, str]:
        """All that decides a run beside its config, part by part: equal worlds have equal ones, and no others."""
        data, mask = self.data, {} if self.pruning is None else self.pruning.mask
        parts: dict[str, Iterable[Buffer]] = {
            "data": (data.train_images, data.train_labels, self.test),
            "partition": (self.partition.sizes, *self.partition.indices),
            "mask": [live.numpy() for live in mask.values()],
            "initial values": (self.program.bytes, self.values, self.stats),
        }
        return {name: _digest(buffers) for name, buffers in parts.items()}

    def samples(self, device: int) -> Samples:
        """The images of one device, where they lie."""
        first, end = int(self.starts[device]), int(self.starts[device + 1])
        return Samples.records(self.records, self.program.image_bytes, first, end - first)

    def images(self, device: int) -> tuple[Bytes, Bytes]:
        """The same as arrays: images [N, channels, height, width], and labels."""
        rows = self.records[self.starts[device] : self.starts[device + 1]]
        return rows[:, 1:].reshape(len(rows), *self.program.input_shape), rows[:, 0]


def make_world(config: Config, progress: Callable[[Step], None] | None = None) -> World:
    """Load, partition, build, prune and compile, as the config says."""
    data, partition = share_out(config)
    order = np.concatenate(partition.indices)
    starts = np.concatenate([[0], np.cumsum(partition.sizes)])
    records = _records(data.train_images[order], data.train_labels[order])
    model = build(
        config.model.name, data.shape, len(data.classes),
        activation=config.model.activation, norm=config.model.norm, init=config.model.init, seed=config.seed,
    )  # fmt: skip
    began = time.perf_counter()
    pruning = _prune(config, data, partition, model, progress)
    seconds = time.perf_counter() - began
    if pruning is not None:
        model = (rescale if config.prune.rescale else apply_mask)(model, pruning.mask)
    program, values = compile(
        model, None if pruning is None else pruning.mask, input_shape=data.shape, mean=data.mean, std=data.std
    )
    return World(
        config, data, partition, records, _records(data.test_images, data.test_labels), starts, model, program,
        np.array(values, np.float32), np.array(stats(model, program), np.float32), pruning, seconds,
    )  # fmt: skip


def normalised(data: Dataset, images: Bytes) -> torch.Tensor:
    """Images as the network sees them."""
    pixels = torch.from_numpy(np.ascontiguousarray(images)).float() / 255
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (data.mean, data.std))
    return (pixels - mean) / std


def _digest(buffers: Iterable[Buffer]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for buffer in buffers:
        digest.update(memoryview(buffer).cast("B") if isinstance(buffer, bytes) else np.ascontiguousarray(buffer).data)
    return digest.hexdigest()


def _records(images: Bytes, labels: Bytes) -> Bytes:
    return np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1)


def _prune(
    config: Config, data: Dataset, partition: Partition, model: nn.Module, progress: Callable[[Step], None] | None
) -> PruneResult | None:
    if config.effective_density == 1:
        return None
    p = config.prune
    return foresight(
        model, config.effective_density, pruner=p.pruner, input_shape=data.shape, iterations=p.iterations,
        redraws=p.redraws, redraw_weights=p.redraw_weights, batch=p.batch, epsilon=p.epsilon, seed=config.seed,
        device_data=_device_data(config, data, partition) if p.pruner == "ntk-ori" else None, progress=progress,
    )  # fmt: skip


def _device_data(config: Config, data: Dataset, partition: Partition) -> Iterator[torch.Tensor]:
    """What NTK-Ori asks of devices: a batch of their own images each, of as many devices as answer a round."""
    everyone = np.arange(config.data.devices)
    for device in Draws(config.seed, "ntk-ori").choose(everyone, config.data.per_round):
        yield normalised(data, data.train_images[partition.indices[device][: config.prune.batch]])

"""Who holds which images: there only in a simulation, for real devices hold their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foreseed.config import Config
from foreseed.data import Dataset, Partition, dirichlet, iid, k_classes
from foreseed.draws import Draws
from foreseed.engine import Samples
from foreseed.engine.errors import ForeseedError
from foreseed.methods.task import Bytes, digest, records


@dataclass(frozen=True, eq=False)
class Population:
    """Every device's images."""

    partition: Partition
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    records: Bytes
    """Every device's shard, one after the other: a label byte and the pixels in each row."""
    starts: npt.NDArray[np.int64]
    """The first row of each device; one more at the end."""

    @staticmethod
    def of(config: Config, data: Dataset) -> Population:
        """The training images, shared out as the config says."""
        partition = partition_of(config, data.train_labels)
        order = np.concatenate(partition.indices)
        starts = np.concatenate([[0], np.cumsum(partition.sizes)])
        rows = records(data.train_images[order], data.train_labels[order])
        return Population(partition, data.classes, data.shape, rows, starts)

    def renumbered(self, holders: Sequence[int]) -> Population:
        """The same images under other numbers: device i then holds what `holders[i]` does now."""
        order, whole = np.asarray(holders), self.partition
        if np.array_equal(order, np.arange(len(whole.sizes))):
            return self
        partition = replace(
            whole,
            indices=tuple(whole.indices[device] for device in order),
            sizes=whole.sizes[order],
            class_counts=whole.class_counts[order],
        )
        rows = np.concatenate([self.records[self.starts[device] : self.starts[device + 1]] for device in order])
        starts = np.concatenate([[0], np.cumsum(partition.sizes)])
        return replace(self, partition=partition, records=rows, starts=starts)

    def samples(self, device: int) -> Samples:
        """The images of one device, where they lie."""
        first, end = int(self.starts[device]), int(self.starts[device + 1])
        return Samples.records(self.records, self.records.shape[1] - 1, first, end - first)

    def rows(self, device: int) -> Bytes:
        """Its shard: a label byte and the pixels in each row."""
        return self.records[self.starts[device] : self.starts[device + 1]]

    def images(self, device: int) -> tuple[Bytes, Bytes]:
        """The same as arrays: images [N, channels, height, width], and labels."""
        rows = self.rows(device)
        return rows[:, 1:].reshape(len(rows), *self.shape), rows[:, 0]

    def digests(self) -> dict[str, str]:
        """All that decides a run, part by part: sorted, the rows are the data, whoever holds them."""
        order = np.argsort(np.concatenate(self.partition.indices))
        rows = (self.records[order[at : at + 1000]] for at in range(0, len(order), 1000))
        return {"data": digest(rows), "partition": digest([self.partition.sizes, *self.partition.indices])}

    def images_to_prune_by(self, config: Config) -> Sequence[tuple[Bytes, Bytes]]:
        """What pruners ask of devices: a batch of their own images each, with labels, of as many as answer a round."""
        everyone = np.arange(config.data.devices)
        asked = Draws(config.seed, "ntk-ori").choose(everyone, config.data.per_round)
        count = config.prune.batch
        return [(images[:count], labels[:count]) for images, labels in map(self.images, asked)]


def partition_of(config: Config, labels: npt.ArrayLike) -> Partition:
    """The partition that the config names, of samples with these labels."""
    c = config.data
    if c.partition == "iid":
        return iid(labels, c.devices, config.seed)
    if c.partition == "k-classes":
        return k_classes(labels, c.devices, c.classes_per_device, config.seed)
    if c.partition == "dirichlet":
        return dirichlet(labels, c.devices, c.beta, config.seed, c.min_size)
    raise ForeseedError(f"data.partition {c.partition!r}: expected 'iid', 'k-classes' or 'dirichlet'; set one of them")

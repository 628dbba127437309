"""The data of an experiment, shared out over its devices."""

from __future__ import annotations

import numpy.typing as npt

from foreseed.config import Config
from foreseed.data import Dataset, Partition, dirichlet, iid, k_classes, load
from foreseed.engine.errors import ForeseedError


def share_out(config: Config) -> tuple[Dataset, Partition]:
    """Load the data set and draw the partition that the config names."""
    data = load(config.data.set, config.data.root or None)
    return data, partition_of(config, data.train_labels)


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

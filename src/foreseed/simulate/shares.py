"""The data of an experiment, shared out over its devices."""

from __future__ import annotations

from foreseed.config import Config
from foreseed.data import Dataset, Partition, dirichlet, iid, k_classes, load
from foreseed.engine.errors import ForeseedError


def share_out(config: Config) -> tuple[Dataset, Partition]:
    """Load the data set and draw the partition that the config names."""
    c = config.data
    data = load(c.set, c.root or None)
    if c.partition == "iid":
        return data, iid(data.train_labels, c.devices, config.seed)
    if c.partition == "k-classes":
        return data, k_classes(data.train_labels, c.devices, c.classes_per_device, config.seed)
    if c.partition == "dirichlet":
        return data, dirichlet(data.train_labels, c.devices, c.beta, config.seed, c.min_size)
    raise ForeseedError(f"data.partition {c.partition!r}: expected 'iid', 'k-classes' or 'dirichlet'; set one of them")

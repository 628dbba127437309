"""Shards: the file that holds a device's own samples, a label byte and then the pixels for each."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from foreseed.data.errors import DataError
from foreseed.data.files import write_whole, writing
from foreseed.data.formats import Bytes
from foreseed.data.partition import Partition
from foreseed.data.sets import Dataset

INDEX = "shards.json"


def shard_name(device: int) -> str:
    """The file of a device's samples, in a folder of shards."""
    return f"device-{device:05}.bin"


def write_shard(path: str | os.PathLike[str], images: Bytes, labels: Bytes) -> str:
    """Write one device's samples; the file is there whole or not at all. Returns its SHA-256."""
    if images.dtype != np.uint8 or images.ndim != 4 or labels.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise DataError(
            f"images {images.dtype} {images.shape} with labels {labels.dtype} {labels.shape}: "
            "expected uint8 [N, channels, height, width] and uint8 [N]"
        )
    if not len(images):
        raise DataError(f"{os.fspath(path)}: no samples for this shard; expected at least one (see min_size)")
    records = np.empty((len(images), 1 + images[0].size), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = images.reshape(len(images), -1)
    write_whole(Path(path), records.data)
    return hashlib.sha256(records.data).hexdigest()


def write_shards(dataset: Dataset, partition: Partition, folder: str | os.PathLike[str]) -> Path:
    """Write the training samples of every device to `device-00000.bin`, ... and list them in `shards.json`.

    `shards.json` is written last: where it is, all shards are. Returns its path.
    """
    target = Path(folder)
    files = [shard_name(device) for device in range(len(partition.indices))]
    others = {path.name for path in target.glob("device-*.bin")}.difference(files)
    if others:
        raise DataError(f"{target} holds shards of another partition, such as {min(others)}; give an empty folder")
    with writing(target / INDEX):
        (target / INDEX).unlink(missing_ok=True)
    devices: list[dict[str, Any]] = []
    for file, indices in zip(files, partition.indices, strict=True):
        sha256 = write_shard(target / file, dataset.train_images[indices], dataset.train_labels[indices])
        devices.append({"file": file, "samples": len(indices), "sha256": sha256})
    index = {
        "data_set": dataset.name,
        "shape": dataset.shape,
        "classes": dataset.classes,
        "mean": dataset.mean,
        "std": dataset.std,
        "devices": devices,
    }
    write_whole(target / INDEX, json.dumps(index, indent=1).encode())
    return target / INDEX

import hashlib
import json
import os

import numpy as np
import pytest

from foreseed.data import DataError, Dataset, dirichlet, iid, write_shard, write_shards
from foreseed.device.shard import open_shard


@pytest.fixture
def dataset():
    rng = np.random.default_rng(6)
    images = rng.integers(0, 256, (60, 2, 3, 4), np.uint8)
    labels = rng.integers(0, 3, 60).astype(np.uint8)
    return Dataset("toy", images, labels, images[:5], labels[:5], ("a", "b", "c"), (0.5, 0.5), (0.1, 0.1))


def test_a_shard_is_a_label_byte_and_the_pixels_for_each_sample(tmp_path, dataset):
    images, labels = dataset.train_images[:3], dataset.train_labels[:3]
    sha256 = write_shard(tmp_path / "x.bin", images, labels)
    expected = b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))
    assert (tmp_path / "x.bin").read_bytes() == expected
    assert sha256 == hashlib.sha256(expected).hexdigest()


def test_shards_hold_what_the_partition_says_and_a_device_can_read_them(tmp_path, dataset):
    partition = dirichlet(dataset.train_labels, 7, 0.5, 1)
    write_shards(dataset, partition, tmp_path / "shards")
    for device, indices in enumerate(partition.indices):
        with open_shard(tmp_path / "shards" / f"device-{device:05}.bin", 24, 3) as shard:
            records = np.frombuffer(bytes(shard.samples.data), np.uint8).reshape(shard.count, 25)
        assert np.array_equal(records[:, 0], dataset.train_labels[indices])
        assert np.array_equal(records[:, 1:].reshape(-1, 2, 3, 4), dataset.train_images[indices])


def test_the_list_of_shards_is_complete(tmp_path, dataset):
    partition = iid(dataset.train_labels, 7, 1)
    index = json.loads(write_shards(dataset, partition, tmp_path).read_text())
    assert index["data_set"] == "toy"
    assert index["shape"] == [2, 3, 4]
    assert index["classes"] == ["a", "b", "c"]
    assert (index["mean"], index["std"]) == ([0.5, 0.5], [0.1, 0.1])
    assert [device["samples"] for device in index["devices"]] == partition.sizes.tolist()
    for device in index["devices"]:
        assert hashlib.sha256((tmp_path / device["file"]).read_bytes()).hexdigest() == device["sha256"]
    assert {path.name for path in tmp_path.iterdir()} == {"shards.json"} | {d["file"] for d in index["devices"]}


def test_an_interrupted_write_leaves_neither_half_a_shard_nor_a_list(tmp_path, dataset, monkeypatch):
    partition = iid(dataset.train_labels, 3, 1)
    write_shards(dataset, partition, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.bin")}
    real = os.replace

    def disk_full(source, target):
        if str(target).endswith("device-00001.bin"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(DataError, match=r"device-00001.bin: cannot write it \(No space left on device\)"):
        write_shards(dataset, partition, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_writing_again_replaces_and_other_shards_are_never_mixed_in(tmp_path, dataset):
    write_shards(dataset, iid(dataset.train_labels, 5, 1), tmp_path)
    write_shards(dataset, iid(dataset.train_labels, 5, 2), tmp_path)
    with pytest.raises(DataError, match=r"another partition, such as device-00003.bin; give an empty folder"):
        write_shards(dataset, iid(dataset.train_labels, 3, 1), tmp_path)
    assert len(json.loads((tmp_path / "shards.json").read_text())["devices"]) == 5


def test_an_empty_device_is_refused(tmp_path, dataset):
    with pytest.raises(DataError, match=r"x.bin: no samples for this shard"):
        write_shard(tmp_path / "x.bin", dataset.train_images[:0], dataset.train_labels[:0])


def test_arrays_of_the_wrong_kind_are_refused(tmp_path, dataset):
    images, labels = dataset.train_images, dataset.train_labels
    for wrong in (
        (images.astype(float), labels),
        (images[0], labels),
        (images, labels[:3]),
        (images, labels.astype(int)),
    ):
        with pytest.raises(DataError, match=r"expected uint8 \[N, channels, height, width\] and uint8 \[N\]"):
            write_shard(tmp_path / "x.bin", *wrong)

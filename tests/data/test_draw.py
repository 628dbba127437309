import csv

import numpy as np
import pytest
from PIL import Image

from foreseed.data import DataError, dirichlet, iid, picture

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LABELS = np.arange(3000) % 10


@pytest.mark.parametrize("devices", [1, 10, 100, 1000])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn_with_its_numbers_beside_it(tmp_path, devices, suffix):
    partition = dirichlet(LABELS, devices, 0.2, 1)
    table = picture(partition, CLASSES, tmp_path / f"who{suffix}")
    assert table == tmp_path / "who.csv"
    with open(table, newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["device", "samples", *CLASSES]
    numbers = np.array(rows[1:], int)
    assert np.array_equal(numbers[:, 0], np.arange(devices))
    assert np.array_equal(numbers[:, 1], partition.sizes)
    assert np.array_equal(numbers[:, 2:], partition.class_counts)
    if suffix == ".png":
        with Image.open(tmp_path / "who.png") as image:
            colours = image.convert("RGB").getcolors(1 << 24)
        assert image.size == (1500, 900)
        assert len(colours) > 20
    else:
        text = (tmp_path / "who.svg").read_text()
        assert "<svg" in text
        assert len(text) < 2_000_000


def test_the_same_partition_gives_the_same_bytes(tmp_path):
    for name in ("a.svg", "b.svg"):
        picture(iid(LABELS, 20, 1), CLASSES, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_hundred_classes_are_drawn(tmp_path):
    names = [f"class {c}" for c in range(100)]
    picture(dirichlet(np.arange(3000) % 100, 30, 0.2, 1), names, tmp_path / "who.png")
    assert (tmp_path / "who.png").stat().st_size > 10_000


def test_an_empty_device_is_drawn(tmp_path):
    partition = dirichlet(LABELS, 50, 0.001, 1, min_size=0)
    assert partition.sizes.min() == 0
    picture(partition, CLASSES, tmp_path / "who.png")
    assert (tmp_path / "who.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["who.pdf", "who"])
def test_other_kinds_of_picture_are_refused(tmp_path, name):
    with pytest.raises(DataError, match=r"expected .svg or .png"):
        picture(iid(LABELS, 5, 1), CLASSES, tmp_path / name)


def test_every_class_needs_a_name(tmp_path):
    with pytest.raises(DataError, match="9 class names for a partition with 10 classes"):
        picture(iid(LABELS, 5, 1), CLASSES[:9], tmp_path / "who.svg")

"""What a server needs of a data set: test images, and no training image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foreseed.data import SETS, DataError, load, load_held_out, sets

RNG = np.random.default_rng(3)
IMAGES, LABELS = RNG.integers(0, 256, (12, 1, 8, 8), dtype=np.uint8), np.arange(12) % 3


def test_with_training_images_it_is_all_but_them() -> None:
    whole, held_out = load("digits"), load_held_out("digits")
    assert held_out.shape == (3, 32, 32)
    np.testing.assert_array_equal(held_out.images, whole.test_images)
    np.testing.assert_array_equal(held_out.labels, whole.test_labels)
    assert (held_out.classes, held_out.mean, held_out.std) == (whole.classes, whole.mean, whole.std)


def test_an_npz_file_may_hold_test_arrays_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "tests.npz", test_images=IMAGES, test_labels=LABELS)
    held_out = load_held_out(tmp_path / "tests.npz")
    np.testing.assert_array_equal(held_out.images, IMAGES)
    assert held_out.classes == ("0", "1", "2")
    assert held_out.mean == pytest.approx((IMAGES.mean() / 255,))
    assert held_out.std == pytest.approx((IMAGES.std() / 255,))
    with pytest.raises(DataError, match="has no array 'train_images'"):
        load(tmp_path / "tests.npz")


def test_a_folder_may_hold_test_images_alone(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "test" / name).mkdir(parents=True)
        for i in range(2):
            pixels = RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "test" / name / f"{i}.png")
    held_out = load_held_out(tmp_path)
    assert held_out.classes == ("cat", "dog")
    assert held_out.images.shape == (4, 3, 32, 32)


def test_the_test_files_of_a_published_set_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = np.concatenate(
        [np.arange(10, dtype=np.uint8)[:, None], RNG.integers(0, 256, (10, 3072), np.uint8)], axis=1
    )
    (tmp_path / "cifar10").mkdir()
    entry = SETS["cifar10"]
    last = replace(entry.members[-1], size=records.nbytes, sha256=None)
    package = replace(entry.packages[0], members=(*entry.packages[0].members[:-1], last))
    monkeypatch.setattr(sets, "SETS", {**SETS, "cifar10": replace(entry, packages=(package,))})
    (tmp_path / "cifar10" / last.name).write_bytes(records.tobytes())
    held_out = load_held_out("cifar10", tmp_path)
    np.testing.assert_array_equal(held_out.labels, np.arange(10))
    assert held_out.classes == entry.classes
    with pytest.raises(DataError, match="foreseed data get cifar10"):
        load("cifar10", tmp_path)


def test_what_is_not_there_is_told_as_by_load(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not on this machine"):
        load_held_out("mnist", tmp_path)
    with pytest.raises(DataError, match="no data set"):
        load_held_out(tmp_path / "nothing")

"""Predictions and evaluations are those of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import foreseed as fs
from foreseed.data import DataError, HeldOut
from foreseed.trained import Trained, evaluate, image_files, predict, predict_files, read_trained


def saved(images: np.ndarray, folder: Path) -> list[Path]:
    """Images as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{i:03}.png" for i in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image.transpose(1, 2, 0)).save(file)
    return files


def test_own_test_images_give_the_accuracy_of_the_run(runs: dict[str, Path], tests: HeldOut) -> None:
    for folder in runs.values():
        result = fs.read(folder)
        found = result.evaluate()
        assert found.images == len(tests.labels)
        assert found.accuracy == result.accuracy
        assert found.loss == pytest.approx(result.rows[-1].loss, rel=1e-12)
        right = sum(score.accuracy * score.images for score in found.classes.values())
        assert right / found.images == pytest.approx(found.accuracy)
        assert [score.images for score in found.classes.values()] == np.bincount(tests.labels).tolist()


def test_classes_are_scored_one_by_one(trained: Trained, tests: HeldOut) -> None:
    guesses = trained.logits(tests.images).argmax(1)
    for label, (name, score) in enumerate(evaluate(trained).classes.items()):
        assert name == tests.classes[label]
        assert score.accuracy == (guesses[tests.labels == label] == label).mean()


def test_files_are_seen_as_their_images(trained: Trained, tests: HeldOut, tmp_path: Path) -> None:
    images = tests.images[:12]
    saved(images, tmp_path / "a" / "deeper")
    files = image_files([tmp_path])
    found = predict_files(trained, files)
    assert found == predict(trained, images)
    assert [one.label for one in found] == trained.logits(images).argmax(1).tolist()
    for one in found:
        assert one.name == trained.classes[one.label]
        assert one.probability == max(one.probabilities.values())
        assert sum(one.probabilities.values()) == pytest.approx(1)


def test_other_sizes_and_modes_are_brought_to_the_shape(trained: Trained, tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P"):
        Image.new(mode, (90, 45)).save(tmp_path / f"{mode}.png")
    assert len(predict_files(trained, image_files([tmp_path]))) == 3


def test_a_folder_of_classes_is_matched_by_name(trained: Trained, tests: HeldOut, tmp_path: Path) -> None:
    kept = np.isin(tests.labels, [3, 7])
    for label in (3, 7):
        saved(tests.images[tests.labels == label], tmp_path / str(label))
    found, guesses = evaluate(trained, str(tmp_path)), trained.logits(tests.images).argmax(1)
    assert list(found.classes) == ["3", "7"]
    assert found.images == kept.sum()
    assert found.accuracy == (guesses == tests.labels)[kept].mean()
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="no class 'cat', only 0, 1, 2"):
        evaluate(trained, str(tmp_path))


def test_test_images_of_a_folder_count_alone(trained: Trained, tests: HeldOut, tmp_path: Path) -> None:
    for part, first in (("train", 0), ("test", 100)):
        for label in range(10):
            some = tests.images[first:][tests.labels[first:] == label]
            saved(some[: 3 if part == "train" else 2], tmp_path / part / str(label))
    assert evaluate(trained, str(tmp_path)).images == 20


def test_an_npz_file_is_matched_by_number(trained: Trained, tests: HeldOut, tmp_path: Path) -> None:
    file = tmp_path / "some.npz"
    np.savez(file, test_images=tests.images[:50], test_labels=tests.labels[:50])
    guesses = trained.logits(tests.images[:50]).argmax(1)
    assert evaluate(trained, str(file)).accuracy == (guesses == tests.labels[:50]).mean()
    np.savez(file, test_images=tests.images[:50], test_labels=tests.labels[:50] + 5)
    with pytest.raises(DataError, match="a label is 14"):
        evaluate(trained, str(file))
    np.savez(file, test_images=tests.images[:50, :1], test_labels=tests.labels[:50])
    with pytest.raises(fs.ConfigError, match="expected uint8 images"):
        evaluate(trained, str(file))


def test_what_is_no_image_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    with pytest.raises(DataError, match=r"1 of 1 images cannot be read: .*text\.png"):
        predict_files(read_trained(runs["lenet5"]), image_files([tmp_path]))
    with pytest.raises(DataError, match="no such file"):
        image_files([tmp_path / "gone.png"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no PNG or JPEG"):
        image_files([tmp_path / "empty"])

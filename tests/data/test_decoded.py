"""Folders of images are decoded once, and what is kept is never taken for something else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foreseed.cli import main
from foreseed.data import DataError, decoded, load, load_held_out

Decodes = list[tuple[int, int, int]]


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    """Images, channels and size of every time that a folder is really decoded."""
    seen: Decodes = []
    real = decoded.read_pictures

    def counted(files: list[Path], shape: tuple[int, int, int]) -> decoded.Bytes:
        seen.append((len(files), *shape[:2]))
        return real(files, shape)

    monkeypatch.setattr(decoded, "read_pictures", counted)
    return seen


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for number in range(5):
            draw(tmp_path / "pets" / name / f"{number}.png", rng.integers(0, 256, (20, 30, 3), np.uint8))
    return tmp_path / "pets"


def draw(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, compress_level=0)  # so that equal shapes make files of equal size


def test_a_folder_is_decoded_once_for_each_size_and_number_of_channels(pets: Path, decodes: Decodes) -> None:
    first = load(pets)
    assert np.array_equal(load(pets).train_images, first.train_images)
    assert decodes == [(10, 3, 32)]
    assert load(pets, size=16, channels=1).shape == load(pets, None, 16, 1).shape == (1, 16, 16)
    assert np.array_equal(load(pets).test_images, first.test_images)
    assert decodes == [(10, 3, 32), (10, 1, 16)]


def test_a_change_that_keeps_name_size_and_time_is_seen(pets: Path, decodes: Decodes, data_folder: Path) -> None:
    before = load(pets)
    changed = pets / "cat" / "0.png"
    was = changed.stat()
    draw(changed, np.full((20, 30, 3), 9, np.uint8))
    os.utime(changed, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert changed.stat().st_size == was.st_size
    after = load(pets)
    assert len(decodes) == 2
    both = [np.concatenate([data.train_images, data.test_images]) for data in (before, after)]
    assert (both[0] != both[1]).any(axis=(1, 2, 3)).sum() == 1
    assert len(list((data_folder / "decoded").iterdir())) == 1


def test_a_file_under_another_name_is_another_folder_s_content(pets: Path, decodes: Decodes) -> None:
    load(pets)
    (pets / "cat" / "0.png").rename(pets / "cat" / "9.png")
    load(pets)
    assert len(decodes) == 2


def test_what_is_kept_and_damaged_is_made_again(pets: Path, decodes: Decodes, data_folder: Path) -> None:
    first = load(pets)
    (kept,) = (data_folder / "decoded").iterdir()
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damage in (b"", whole[: len(whole) // 2], bytes(flipped)):
        kept.write_bytes(damage)
        assert np.array_equal(load(pets).train_images, first.train_images)
        assert kept.read_bytes() == whole
    assert len(decodes) == 4


def test_a_folder_loads_where_nothing_can_be_kept(pets: Path, decodes: Decodes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert load(pets, tmp_path / "file" / "data").shape == (3, 32, 32)
    assert len(decodes) == 2


def test_damaged_images_of_train_and_test_are_named_together(pets: Path, tmp_path: Path, data_folder: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (pets / part).mkdir(exist_ok=True)
            draw(pets / part / name / "good.png", np.zeros((8, 8, 3), np.uint8))
            (pets / part / name / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"4 of 8 images .*train/cat/bad.png .*train/dog.*test/cat.*test/dog/bad.png"):
        load(pets)
    assert not (data_folder / "decoded").exists()


def test_a_server_s_test_folder_has_the_size_asked_for(pets: Path, tmp_path: Path, decodes: Decodes) -> None:
    (tmp_path / "held").mkdir()
    pets.rename(tmp_path / "held" / "test")
    for _ in range(2):
        assert load_held_out(tmp_path / "held", None, 24, 1).shape == (1, 24, 24)
    assert decodes == [(10, 1, 24)]


@pytest.mark.parametrize(
    ("name", "size", "channels", "words"),
    [
        ("digits", 28, 0, "digits is used as published; leave out data.size and data.channels"),
        ("cifar10", 0, 1, "cifar10 is used as published"),
        ("digits", 0, 4, "data.channels = 4: images are made grey or RGB; set 1 or 3"),
        ("pets", 0, 2, "data.channels = 2: images are made grey or RGB; set 1 or 3"),
        ("own.npz", 28, 0, "keep their size; resize them there"),
    ],
)
def test_a_size_that_nothing_is_made_of_is_refused(
    name: str, size: int, channels: int, words: str, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pets.parent)
    Path("own.npz").write_bytes(b"")
    for read in (load, load_held_out):
        with pytest.raises(DataError, match=words):
            read(name, None, size, channels)


def test_info_says_what_becomes_of_images(pets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(pets / "dog" / "grey.png", np.zeros((300, 200), np.uint8))
    assert main(["data", "info", str(pets)]) == 0
    said = capsys.readouterr().out
    assert "from: 11 files of 30x20 to 200x300 (L, RGB), made RGB of 32x32 (data.size and data.channels" in said
    assert main(["data", "info", str(pets), "--size", "64", "--channels", "1"]) == 0
    said = capsys.readouterr().out
    assert "made grey of 64x64" in said
    assert "shape: 1, 64, 64" in said

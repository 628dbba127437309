from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from foreseed.data import DataError
from foreseed.data.formats import (
    _npz_images,
    class_folders,
    enlarge,
    list_pictures,
    read_cifar,
    read_idx,
    read_npz,
    read_pictures,
)


def idx(shape, content):
    return b"\0\0\x08" + bytes([len(shape)]) + np.array(shape, ">u4").tobytes() + content


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=4), st.randoms(use_true_random=False))
def test_idx_gives_back_what_was_written(shape, random):
    array = np.array([random.randrange(256) for _ in range(int(np.prod(shape)))], np.uint8).reshape(shape)
    assert np.array_equal(read_idx(idx(shape, array.tobytes()), "x"), array)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not an IDX file"),
        (b"\0\0\x08", "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\1aaaa", "starts with 00 00 0d 01"),
        (b"\0\0\x08\x03\0\0", "not an IDX file"),
        (idx((2, 3), b"12345"), "17 bytes, its header announces 18"),
        (idx((2, 3), b"1234567"), "19 bytes, its header announces 18"),
        (idx((2**32 - 1,) * 4, b""), "its header announces"),
    ],
)
def test_a_bad_idx_file_is_named_with_what_was_expected(data, words):
    with pytest.raises(DataError, match=f"t10k.*{words}"):
        read_idx(data, "t10k")


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_records_are_taken_apart_and_the_finest_label_counts(label_bytes):
    images = np.random.default_rng(1).integers(0, 256, (4, 3, 32, 32), np.uint8)
    labels = np.array([3, 1, 4, 1], np.uint8)
    coarse = np.full((4, label_bytes - 1), 9, np.uint8)
    rows = np.concatenate([coarse, labels[:, None], images.reshape(4, -1)], axis=1)
    found_images, found_labels = read_cifar(rows.tobytes(), label_bytes, "x")
    assert np.array_equal(found_images, images)
    assert np.array_equal(found_labels, labels)


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_a_cifar_file_that_is_no_whole_number_of_records_is_refused(size):
    with pytest.raises(DataError, match=r"test.bin: .* expected a multiple of 3,073"):
        read_cifar(bytes(size), 1, "test.bin")


@pytest.fixture
def arrays():
    rng = np.random.default_rng(2)
    return {
        "train_images": rng.integers(0, 256, (5, 2, 7, 6), np.uint8),
        "train_labels": np.array([0, 1, 2, 1, 0]),
        "test_images": rng.integers(0, 256, (3, 2, 7, 6), np.uint8),
        "test_labels": np.array([2, 2, 0]),
    }


def test_npz_gives_back_what_was_saved(tmp_path, arrays):
    np.savez_compressed(tmp_path / "mine.npz", **arrays)
    for found, saved in zip(read_npz(tmp_path / "mine.npz"), arrays.values(), strict=True):
        assert found.dtype == np.uint8
        assert np.array_equal(found, saved)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train_images", np.zeros((5, 42), np.uint8), r"train_images is uint8 of shape \(5, 42\); expected uint8"),
        ("train_images", np.zeros((5, 2, 7, 6)), "train_images is float64"),
        ("train_images", np.zeros((0, 2, 7, 6), np.uint8), "train_images is uint8 of shape"),
        ("train_images", np.zeros((5, 65, 7, 6), np.uint8), "at most 64"),
        ("train_images", np.uint8(3), "train_images is uint8 of shape"),
        (
            "test_images",
            np.zeros((3, 2, 6, 7), np.uint8),
            r"test_images has images of \(2, 6, 7\), the training images",
        ),
        ("train_labels", np.zeros(4, int), "train_labels is int64 of shape .*expected 5 integers"),
        ("test_labels", np.array([0, 1, 256]), "from 0 to 255"),
        ("test_labels", np.array([0, -1, 2]), "from 0 to 255"),
        ("test_labels", np.array([0.0, 1.0, 2.0]), "test_labels is float64"),
        ("test_labels", np.array([0, None, 2]), "not an NPZ file of plain arrays"),
        ("test_labels", None, "has no array 'test_labels'"),
    ],
)
def test_a_bad_npz_array_is_named_with_what_was_expected(tmp_path, arrays, key, value, words):
    arrays[key] = value
    np.savez(tmp_path / "mine.npz", **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(DataError, match=f"mine.npz: .*{words}"):
        read_npz(tmp_path / "mine.npz")


def save_alike(path, images):
    labels = np.arange(len(images))
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)


def test_grey_images_need_no_axis_for_their_channel(tmp_path):
    images = np.random.default_rng(3).integers(0, 256, (4, 28, 28), np.uint8)
    save_alike(tmp_path / "grey.npz", images)
    assert np.array_equal(read_npz(tmp_path / "grey.npz")[0], images[:, None])


def test_channels_that_come_last_are_refused_with_the_fix_and_the_fix_works(tmp_path):
    images = np.random.default_rng(3).integers(0, 256, (4, 24, 32, 3), np.uint8)
    save_alike(tmp_path / "last.npz", images)
    words = r"looks like \[images, height, width, channels\]; set data.channels = 3, .* or data.channels = 24 if"
    with pytest.raises(DataError, match=words):
        read_npz(tmp_path / "last.npz")
    assert np.array_equal(read_npz(tmp_path / "last.npz", channels=3)[2], images.transpose(0, 3, 1, 2))
    assert np.array_equal(read_npz(tmp_path / "last.npz", channels=24)[2], images)
    with pytest.raises(DataError, match="has 5 channels neither first nor last"):
        read_npz(tmp_path / "last.npz", channels=5)


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 70), st.integers(0, 70))
def test_images_of_any_shape_come_whole_with_the_channels_asked_for_or_not_at_all(a, b, c, channels):
    images = np.arange(a * b * c, dtype=np.uint8).reshape(1, a, b, c)
    try:
        found = _npz_images(Path("x.npz"), "train_images", images, channels)
    except DataError:
        return
    assert channels in (0, found.shape[1])
    assert found.shape[1] <= 64
    turned = images.transpose(0, 3, 1, 2)
    assert np.array_equal(found, images) or (channels and np.array_equal(found, turned))


def test_a_file_that_is_no_npz_is_named(tmp_path, arrays):
    np.savez(tmp_path / "good.npz", **arrays)
    (tmp_path / "short.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:500])
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "single.npy", arrays["train_images"])
    for name in ("short.npz", "text.npz", "empty.npz", "single.npy"):
        with pytest.raises(DataError, match=f"{name}: not an NPZ file"):
            read_npz(tmp_path / name)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def read_class_folders(folder, classes, channels=3, size=32):
    files, labels = list_pictures(folder, classes)
    return read_pictures(files, (channels, size, size)), labels


def test_class_folders_are_read_in_order_and_exactly(tmp_path):
    rng = np.random.default_rng(3)
    pixels = {name: rng.integers(0, 256, (32, 32, 3), np.uint8) for name in ("cat/2.png", "cat/10.PNG", "ant/1.png")}
    for name, image in pixels.items():
        save(tmp_path / name, image)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    classes = class_folders(tmp_path)
    images, labels = read_class_folders(tmp_path, classes)
    assert classes == ["ant", "cat"]
    assert labels.tolist() == [0, 1, 1]
    for found, name in zip(images, ("ant/1.png", "cat/10.PNG", "cat/2.png"), strict=True):
        assert np.array_equal(found, pixels[name].transpose(2, 0, 1))


def test_a_wide_grey_image_is_scaled_and_cropped_around_its_middle(tmp_path):
    wide = np.zeros((64, 192), np.uint8)
    wide[:, 64:128] = 200
    save(tmp_path / "a" / "wide.jpg", wide)
    save(tmp_path / "b" / "other.png", wide)
    images, _ = read_class_folders(tmp_path, ["a", "b"])
    assert images.shape == (2, 3, 32, 32)
    assert abs(images[:, :, :, 2:-2].astype(int) - 200).max() <= 3


def test_a_photograph_on_its_side_is_turned_upright(tmp_path):
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 250
    exif = Image.Exif()
    exif[0x0112] = 3
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "turned.jpg", exif=exif)
    images, _ = read_class_folders(tmp_path, ["a"])
    assert images[0, :, :15].max() < 30
    assert images[0, :, 17:].min() > 220


def test_every_damaged_image_is_named(tmp_path):
    save(tmp_path / "a" / "1.png", np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    whole = (tmp_path / "a" / "1.png").read_bytes()
    for name, broken in {"2.png": b"", "3.jpg": b"text", "4.png": whole[:-40], "5.png": whole}.items():
        (tmp_path / "a" / name).write_bytes(broken)
    with pytest.raises(DataError) as caught:
        read_class_folders(tmp_path, ["a"])
    said = str(caught.value)
    assert said.startswith("3 of 5 images cannot be read: ")
    assert said.endswith("; replace or remove them")
    assert [name for name in ("1.png", "2.png", "3.jpg", "4.png", "5.png") if name in said] == [
        "2.png",
        "3.jpg",
        "4.png",
    ]


def test_images_take_the_size_and_the_channels_asked_for(tmp_path):
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[..., 1] = 200
    save(tmp_path / "a" / "green.png", pixels)
    colour, _ = read_class_folders(tmp_path, ["a"], channels=3, size=48)
    grey, _ = read_class_folders(tmp_path, ["a"], channels=1, size=20)
    assert (colour.shape, grey.shape) == ((1, 3, 48, 48), (1, 1, 20, 20))
    assert colour[0, :, 5, 5].tolist() == [0, 200, 0]
    assert (grey == 117).all()  # 0.587 of the green


def test_a_class_without_images_is_named(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="cat has no PNG or JPEG files"):
        read_class_folders(tmp_path, ["cat"])


@pytest.mark.parametrize("n", [0, 1, 257])
def test_two_to_256_classes_are_expected(tmp_path, n):
    for i in range(n):
        (tmp_path / f"class{i}").mkdir()
    with pytest.raises(DataError, match=f"has {n} subfolders; expected 2 to 256"):
        class_folders(tmp_path)


def test_enlarging_keeps_flat_areas_and_the_way_up():
    image = np.zeros((1, 8, 8), np.uint8)
    image[0, :4] = 200
    large = enlarge(image, 32)
    assert large.shape == (1, 32, 32)
    assert large.dtype == np.uint8
    assert (large[0, :10] == 200).all()
    assert (large[0, 22:] == 0).all()

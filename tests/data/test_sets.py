import dataclasses
import hashlib
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from foreseed.data import DataError, get, load, sets


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def check_moments(dataset):
    pixels = dataset.train_images / 255
    assert np.allclose(dataset.mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-12)
    assert np.allclose(dataset.std, pixels.std(axis=(0, 2, 3)), rtol=1e-12)


def test_digits_have_the_promised_shapes(digits):
    assert digits.train_images.shape == (1437, 3, 32, 32)
    assert digits.test_images.shape == (360, 3, 32, 32)
    assert digits.shape == (3, 32, 32)
    assert digits.train_labels.shape == (1437,)
    assert digits.test_labels.shape == (360,)
    assert digits.classes == tuple("0123456789")
    arrays = (digits.train_images, digits.train_labels, digits.test_images, digits.test_labels)
    assert all(array.dtype == np.uint8 for array in arrays)
    check_moments(digits)


def test_digits_are_grey_if_asked_for(digits):
    grey = load("digits", None, 0, 1)
    assert grey.shape == (1, 32, 32)
    assert np.array_equal(np.repeat(grey.train_images, 3, axis=1), digits.train_images)
    assert np.array_equal(np.repeat(grey.test_images, 3, axis=1), digits.test_images)
    check_moments(grey)


def test_digits_are_grey_and_use_the_whole_range(digits):
    assert (digits.train_images[:, 0] == digits.train_images[:, 1]).all()
    assert (digits.train_images[:, 0] == digits.train_images[:, 2]).all()
    assert digits.train_images.min() == 0
    assert digits.train_images.max() == 255


def test_digits_are_split_evenly_by_class_and_always_alike(digits):
    counts = np.bincount(digits.test_labels)
    assert counts.min() >= 34
    assert counts.max() <= 38
    both = np.concatenate([digits.train_images, digits.test_images])[:, 0]
    assert len(np.unique(both.reshape(len(both), -1), axis=0)) == len(both)
    labels = hashlib.sha256(digits.train_labels.tobytes() + digits.test_labels.tobytes()).hexdigest()
    assert labels == "fa5e6eeb987695cf4afc384c0996bf49efd78fd4af7b68aa7b429ec2672c6562"


def test_digits_can_be_learned_from(digits):
    """Nearest class mean gets most of the test images right, so images and labels belong together."""
    train = digits.train_images.reshape(1437, -1).astype(float)
    means = np.stack([train[digits.train_labels == c].mean(axis=0) for c in range(10)])
    test = digits.test_images.reshape(360, 1, -1).astype(float)
    guesses = ((test - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (guesses == digits.test_labels).mean() > 0.85


def test_a_dataset_cannot_be_changed_by_accident(digits):
    with pytest.raises(dataclasses.FrozenInstanceError):
        digits.name = "other"


def test_mnist_is_padded_to_32x32_in_one_channel(small_mnist, tmp_path):
    small_mnist.put(tmp_path / "mnist")
    dataset = load("mnist", tmp_path)
    raw = np.frombuffer(small_mnist.files["train-images-idx3-ubyte"], np.uint8, offset=16).reshape(6, 28, 28)
    assert dataset.train_images.shape == (6, 1, 32, 32)
    assert dataset.test_images.shape == (2, 1, 32, 32)
    assert np.array_equal(dataset.train_images[:, 0, 2:30, 2:30], raw)
    assert dataset.train_images.sum(dtype=int) == raw.sum(dtype=int)
    assert dataset.train_labels.tobytes() == small_mnist.files["train-labels-idx1-ubyte"][8:]
    assert dataset.test_labels.tobytes() == small_mnist.files["t10k-labels-idx1-ubyte"][8:]
    check_moments(dataset)


def test_mnist_loads_from_packed_files_too(small_mnist, tmp_path):
    small_mnist.put(tmp_path / "a" / "mnist", packed=True)
    small_mnist.put(tmp_path / "b" / "mnist")
    assert np.array_equal(load("mnist", tmp_path / "a").train_images, load("mnist", tmp_path / "b").train_images)


def test_cifar10_batches_are_joined_in_order(small_cifar, tmp_path):
    get("cifar10", tmp_path, small_cifar.put(tmp_path / "usb"))
    dataset = load("cifar10", tmp_path)
    assert dataset.train_images.shape == (15, 3, 32, 32)
    assert dataset.test_images.shape == (3, 3, 32, 32)
    assert dataset.train_labels.tolist() == [number + i for number in range(5) for i in range(3)]
    assert dataset.test_labels.tolist() == [5, 6, 7]
    assert dataset.train_images[3].tobytes() == small_cifar.files["data_batch_2.bin"][1:3073]
    assert dataset.test_images[2].tobytes() == small_cifar.files["test_batch.bin"][-3072:]
    check_moments(dataset)


@pytest.mark.parametrize("small_cifar", ["cifar100"], indirect=True)
def test_cifar100_uses_the_fine_label(small_cifar, tmp_path):
    get("cifar100", tmp_path, small_cifar.put(tmp_path / "usb"))
    dataset = load("cifar100", tmp_path)
    assert dataset.train_labels.tolist() == [1, 2, 3]
    assert dataset.test_labels.tolist() == [2, 3, 4]
    assert dataset.train_images[1].tobytes() == small_cifar.files["train.bin"][3076 : 3076 + 3072]


def test_arrays_can_be_handed_to_torch(small_cifar, small_mnist, tmp_path):
    """Torch warns of arrays that cannot be written and copies those that are not contiguous."""
    small_cifar.put(tmp_path / "cifar10")
    small_mnist.put(tmp_path / "mnist")
    for name in ("cifar10", "mnist"):
        dataset = load(name, tmp_path)
        for array in (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels):
            assert array.flags.writeable
            assert array.flags.c_contiguous


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_a_missing_set_says_how_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr("foreseed.data.store.os.path.isfile", lambda _: False)
    with pytest.raises(DataError, match=f"get it with `foreseed data get {name}`"):
        load(name, tmp_path)


def test_a_corrupt_file_is_named_with_what_was_expected_and_what_to_do(small_cifar, tmp_path):
    folder = small_cifar.put(tmp_path / "cifar10")
    content = bytearray(small_cifar.files["data_batch_4.bin"])
    content[5000] ^= 1
    (folder / "data_batch_4.bin").write_bytes(content)
    expected = hashlib.sha256(small_cifar.files["data_batch_4.bin"]).hexdigest()
    with pytest.raises(
        DataError, match=f"data_batch_4.bin has SHA-256 .*expected {expected}.*foreseed data get cifar10"
    ):
        load("cifar10", tmp_path)


def test_a_corrupt_packed_file_is_named(small_mnist, tmp_path):
    folder = small_mnist.put(tmp_path / "mnist", packed=True)
    packed = folder / "t10k-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz is damaged .*foreseed data get mnist"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("small_cifar", ["cifar100"], indirect=True)
def test_a_label_beyond_the_classes_is_refused(small_cifar, tmp_path):
    folder = small_cifar.put(tmp_path / "cifar100")
    content = bytearray(small_cifar.files["test.bin"])
    content[1] = 100
    (folder / "test.bin").write_bytes(content)
    with pytest.raises(DataError, match="a label is 100, expected 0 to 99"):
        load("cifar100", tmp_path)


def test_files_of_an_unknown_layout_are_refused(tmp_path, monkeypatch):
    entry = dataclasses.replace(sets.SETS["cifar10"], layout="cifar1000")
    monkeypatch.setattr(sets, "SETS", {"cifar10": entry})
    with pytest.raises(DataError, match="cifar10: no reader for files of layout 'cifar1000'"):
        load("cifar10", tmp_path)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(
        DataError, match=r"no data set 'imagnet': expected one of digits, .* folder of images or of an .npz"
    ):
        load("imagnet")


def make_folder(folder, classes, n, seed=0):
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(n):
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / name / f"{i}.png")


def test_a_folder_of_images_is_split_by_class_and_always_alike(tmp_path):
    make_folder(tmp_path / "pets", ("cat", "dog"), 10)
    dataset = load(tmp_path / "pets")
    assert dataset.name == "pets"
    assert dataset.classes == ("cat", "dog")
    assert np.bincount(dataset.train_labels).tolist() == [8, 8]
    assert np.bincount(dataset.test_labels).tolist() == [2, 2]
    again = load(str(tmp_path / "pets"))
    assert np.array_equal(again.train_images, dataset.train_images)
    check_moments(dataset)


def test_a_folder_with_train_and_test_keeps_its_split(tmp_path):
    make_folder(tmp_path / "train", ("cat", "dog"), 3)
    make_folder(tmp_path / "test", ("cat", "dog"), 1, seed=1)
    dataset = load(tmp_path)
    assert dataset.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.test_labels.tolist() == [0, 1]


def test_a_folder_with_half_a_split_is_explained(tmp_path):
    make_folder(tmp_path / "train", ("cat", "dog"), 1)
    with pytest.raises(DataError, match="only one of train/ and test/"):
        load(tmp_path)


def test_train_and_test_must_have_the_same_classes(tmp_path):
    make_folder(tmp_path / "train", ("cat", "dog"), 1)
    make_folder(tmp_path / "test", ("cat", "emu"), 1)
    with pytest.raises(DataError, match="different class folders"):
        load(tmp_path)


def test_a_class_with_one_image_cannot_be_split(tmp_path):
    make_folder(tmp_path, ("cat", "dog"), 1)
    with pytest.raises(DataError, match="class 'cat' has one image; expected at least 2"):
        load(tmp_path)


def test_every_class_keeps_training_images_however_few_there_are(tmp_path):
    make_folder(tmp_path, ("ant", "bee", "cat"), 2)
    dataset = load(tmp_path)
    assert set(dataset.train_labels.tolist()) == {0, 1, 2}
    assert len(dataset.test_labels) == 2


def test_an_npz_file_of_any_image_size_loads(tmp_path):
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (6, 1, 5, 9), np.uint8)
    np.savez(
        tmp_path / "mine.npz",
        train_images=images,
        train_labels=np.arange(6) % 3,
        test_images=images[:2],
        test_labels=np.array([3, 0]),
    )
    dataset = load(tmp_path / "mine.npz")
    assert dataset.name == "mine"
    assert dataset.shape == (1, 5, 9)
    assert dataset.classes == ("0", "1", "2", "3")
    check_moments(dataset)


def test_a_channel_that_is_constant_cannot_be_normalised(tmp_path):
    images = np.random.default_rng(4).integers(0, 256, (6, 2, 5, 9), np.uint8)
    images[:, 1] = 7
    labels = np.zeros(6, int)
    np.savez(tmp_path / "x.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(DataError, match="channel 1 is the same everywhere"):
        load(tmp_path / "x.npz")


def test_importing_the_room_loads_no_heavy_library():
    code = "import sys, foreseed.data; print({'torch', 'PIL', 'sklearn', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

"""Data sets, ready to be shared out over devices."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreseed.data.catalog import SETS, DataFile, Entry
from foreseed.data.decoded import decode_once
from foreseed.data.errors import DataError
from foreseed.data.files import reading
from foreseed.data.formats import Bytes, class_folders, enlarge, list_pictures, read_cifar, read_idx, read_npz, sizes_of
from foreseed.data.store import data_root, read_member, where

_TEST_SHARE = 5
"""Where a set has no test images of its own, one image in five becomes one."""
_SPLIT_SEED = 0
_SIZE, _CHANNELS = 32, 3
"""What a folder's images become if nothing else is asked for: the size of CIFAR and of the built-in models' input."""
_LABEL_BYTES = {"cifar10": 1, "cifar100": 2}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What a server needs of a data set: images to test with, and how images are normalised."""

    images: Bytes
    labels: Bytes
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, channels, height, width = self.images.shape
        return channels, height, width


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images for training and for testing; images are uint8 [N, channels, height, width]."""

    name: str
    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Mean of each channel over the training images, where a pixel counts 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel over the training images."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.held_out.shape

    @property
    def held_out(self) -> HeldOut:
        """All but the training images."""
        return HeldOut(self.test_images, self.test_labels, self.classes, self.mean, self.std)


def load_held_out(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, size: int = 0, channels: int = 0
) -> HeldOut:
    """The test images of a data set that `load` knows; no training image need be there.

    Where they are, they give the normalisation, so that a server has that of a simulation; elsewhere the test images
    do. Without training images a set is its test files alone, a folder with test/, or an .npz file with test arrays.
    """
    try:
        return load(name, root, size, channels).held_out
    except DataError:
        if (found := _test_alone(name, root, size, channels)) is None:
            raise
    images, labels, names = found
    mean, std = _moments(images)
    return HeldOut(_own(images), _own(labels), names or _numbered(labels), mean, std)


def _test_alone(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None, size: int, channels: int
) -> tuple[Bytes, Bytes, tuple[str, ...] | None] | None:
    """Test images, labels and the classes' names (if they have any) of a set without training images."""
    if isinstance(name, str) and name in SETS:
        entry = SETS[name]
        folder = data_root(root) / entry.name
        if entry.layout == "built-in" or size or channels or not folder.is_dir():
            return None
        if entry.layout == "idx":
            images, labels = (read_idx(read_member(folder, member), member.name) for member in entry.members[2:])
            return _pad(images), labels, entry.classes
        return (*_cifar_batch(folder, entry, entry.members[-1]), entry.classes)
    path = Path(name).expanduser()
    with reading(path):
        if path.is_file() and not size:
            images, labels = read_npz(path, ["test"], channels)
            return images, labels, None
        if (path / "test").is_dir() and not (path / "train").is_dir():
            classes = class_folders(path / "test")
            files, labels = list_pictures(path / "test", classes)
            return decode_once(path / "test", files, *_picture_shape(size, channels), root), labels, tuple(classes)
    return None


def _cifar_batch(folder: Path, entry: Entry, member: DataFile) -> tuple[Bytes, Bytes]:
    return read_cifar(read_member(folder, member), _LABEL_BYTES[entry.layout], member.name)


def load(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, size: int = 0, channels: int = 0
) -> Dataset:
    """Load a data set: one of the names in `SETS`, a folder of images, or an .npz file.

    - `digits`: scikit-learn's 8x8 handwritten digits, enlarged to 32x32 with the grey in all three `channels` (so
      that models for CIFAR apply), 1,437 for training and 360 for testing, always the same ones.
    - `mnist`, `fashion-mnist`: one channel, the 28x28 images in a black margin that makes them 32x32.
    - `cifar10`, `cifar100`: as published, 3x32x32; CIFAR-100 with its 100 fine labels.
    - a folder: `<folder>/<class>/*.png|jpg`, or the same in `<folder>/train` and `<folder>/test`. Without the two,
      one image in five is set aside for testing, always the same ones. Images become RGB of 32x32, or of `size`, or
      grey with one of `channels`; they are decoded once, and kept under the root.
    - an .npz file with train_images, train_labels, test_images and test_labels, of any image size; where channels
      come last, `channels` says how many there are.

    Files are checked as they are read; nothing is downloaded here (`get` does that).
    """
    if isinstance(name, str) and name in SETS:
        entry = SETS[name]
        built_in = entry.layout == "built-in"
        if size or (channels and not built_in):
            raise DataError(f"data set {name} is used as published; leave out data.size and data.channels")
        return _digits(entry, _picture_shape(size, channels)[0]) if built_in else _published(entry, root)
    path = Path(name).expanduser()
    with reading(path):
        if path.is_dir():
            return _folder(path, root, *_picture_shape(size, channels))
        if path.is_file():
            if size:
                raise DataError(f"{path}: an .npz file's images keep their size; resize them there, without data.size")
            train, train_labels, test, test_labels = read_npz(path, channels=channels)
            return _dataset(path.stem, train, train_labels, test, test_labels)
    raise DataError(
        f"no data set {os.fspath(name)!r}: expected one of {', '.join(SETS)}, "
        "or the path of a folder of images or of an .npz file"
    )


def origin(name: str | os.PathLike[str], size: int = 0, channels: int = 0) -> str:
    """Where the images of a data set come from, and what is made of them."""
    path = Path(name).expanduser()
    if isinstance(name, str) and name in SETS:
        return SETS[name].summary
    if not path.is_dir():
        return "the arrays of the file"
    with reading(path):
        parts = [path / part for part in ("train", "test") if (path / part).is_dir()] or [path]
        files = [file for part in parts for file in list_pictures(part, class_folders(part))[0]]
        colours, side = _picture_shape(size, channels)
        made = f"{'grey' if colours == 1 else 'RGB'} of {side}x{side} (data.size and data.channels change that)"
        return f"{len(files):,} files of {sizes_of(files)}, made {made}"


def _picture_shape(size: int, channels: int) -> tuple[int, int]:
    """Channels and size of a folder's images."""
    if channels not in (0, 1, 3):
        raise DataError(f"data.channels = {channels}: images are made grey or RGB; set 1 or 3")
    return channels or _CHANNELS, size or _SIZE


def _digits(entry: Entry, channels: int) -> Dataset:
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = enlarge(np.rint(data.images * (255 / 16)).astype(np.uint8), 32)
    images = np.repeat(grey[:, None], channels, axis=1)
    return _dataset(entry.name, *_split(images, data.target.astype(np.uint8)), entry.classes)


def _published(entry: Entry, root: str | os.PathLike[str] | None) -> Dataset:
    if entry.layout not in ("idx", *_LABEL_BYTES):
        raise DataError(f"{entry.name}: no reader for files of layout {entry.layout!r}; name another in the catalogue")
    folder = where(entry.name, root)
    command = f"`foreseed data get {entry.name}`"
    if folder is None:
        raise DataError(f"data set {entry.name} is not on this machine; get it with {command}")
    try:
        if entry.layout == "idx":
            # The four files are entered in the order in which a Dataset takes them.
            train, train_labels, test, test_labels = (read_idx(read_member(folder, m), m.name) for m in entry.members)
            return _dataset(entry.name, _pad(train), train_labels, _pad(test), test_labels, entry.classes)
        *batches, (test, test_labels) = (_cifar_batch(folder, entry, member) for member in entry.members)
        train = np.concatenate([images for images, _ in batches])
        train_labels = np.concatenate([labels for _, labels in batches])
        return _dataset(entry.name, train, train_labels, test, test_labels, entry.classes)
    except DataError as error:
        raise DataError(f"{error}: {command}") from None


def _pad(images: Bytes) -> Bytes:
    """28x28 images in a black margin of two pixels, as [N, 1, 32, 32]."""
    return np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None]


def _folder(path: Path, root: str | os.PathLike[str] | None, channels: int, size: int) -> Dataset:
    train, test = path / "train", path / "test"
    if train.is_dir() != test.is_dir():
        raise DataError(f"{path} has only one of train/ and test/; give it both, or the class folders alone")
    name = path.resolve().name
    if train.is_dir():
        classes = class_folders(train)
        if class_folders(test) != classes:
            raise DataError(f"{path}: train/ and test/ have different class folders; give them the same")
        (files, labels), (test_files, test_labels) = (list_pictures(part, classes) for part in (train, test))
        images = decode_once(path, [*files, *test_files], channels, size, root)
        n = len(files)
        return _dataset(name, images[:n], labels, images[n:], test_labels, tuple(classes))
    classes = class_folders(path)
    files, labels = list_pictures(path, classes)
    few = np.flatnonzero(np.bincount(labels) < 2)
    if len(few):
        raise DataError(f"{path}: class {classes[few[0]]!r} has one image; expected at least 2, to train and to test")
    return _dataset(name, *_split(decode_once(path, files, channels, size, root), labels), tuple(classes))


def _split(images: Bytes, labels: Bytes) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Set one image in five of every class aside for testing; the same images every time."""
    shuffled = np.lexsort((np.random.PCG64(_SPLIT_SEED).random_raw(len(labels)), labels))
    is_test = np.zeros(len(labels), bool)
    is_test[shuffled[::_TEST_SHARE]] = True
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def _dataset(
    name: str,
    train_images: Bytes,
    train_labels: Bytes,
    test_images: Bytes,
    test_labels: Bytes,
    classes: tuple[str, ...] | None = None,
) -> Dataset:
    top = int(max(train_labels.max(), test_labels.max()))
    names = classes or _numbered(train_labels, test_labels)
    if top >= len(names):
        raise DataError(f"data set {name}: a label is {top}, expected 0 to {len(names) - 1}; get it again")
    mean, std = _moments(train_images)
    if 0.0 in std:
        raise DataError(f"data set {name}: channel {std.index(0.0)} is the same everywhere in training; leave it out")
    return Dataset(name, _own(train_images), _own(train_labels), _own(test_images), _own(test_labels), names, mean, std)


def _numbered(*labels: Bytes) -> tuple[str, ...]:
    """Names for classes that have none."""
    return tuple(str(label) for label in range(1 + max(int(some.max()) for some in labels)))


def _own(array: Bytes) -> Bytes:
    """The array itself, or a copy of a view of a file's bytes: those are read-only or strided, which torch refuses."""
    return np.require(array, requirements=("C", "W"))


def _moments(images: Bytes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, from exact integer sums."""
    n = images.size // images.shape[1]
    total = np.zeros(images.shape[1], np.uint64)
    squares = np.zeros_like(total)
    for first in range(0, len(images), 1000):  # the squares of all images at once would take twice their memory
        chunk = images[first : first + 1000]
        total += chunk.sum(axis=(0, 2, 3), dtype=np.uint64)
        squares += np.multiply(chunk, chunk, dtype=np.uint16).sum(axis=(0, 2, 3), dtype=np.uint64)
    mean = [int(s) / n for s in total]
    variance = [(n * int(q) - int(s) ** 2) / n**2 for s, q in zip(total, squares, strict=True)]
    return tuple(m / 255 for m in mean), tuple(math.sqrt(v) / 255 for v in variance)

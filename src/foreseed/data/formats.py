"""Readers of the file formats that images come in; none of them runs code from a file (no pickles)."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreseed.data.errors import DataError

Bytes = npt.NDArray[np.uint8]

SIDE = 32
"""Height and width that images of a folder are brought to, the size of CIFAR and of the built-in models' input."""

_CIFAR_PIXELS = 3 * 32 * 32
_SUFFIXES = {".png", ".jpg", ".jpeg"}
_MODES = {1: "L", 3: "RGB"}


def read_idx(data: bytes, name: str) -> Bytes:
    """The array in an IDX file (the format of MNIST): unsigned bytes of any number of dimensions."""
    if data[:3] != b"\0\0\x08" or len(data) < 4 or len(data) < 4 + 4 * data[3]:
        raise DataError(
            f"{name}: not an IDX file of bytes: it starts with {data[:4].hex(' ')}, expected 00 00 08 and rank"
        )
    at = 4 + 4 * data[3]
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", data[3], 4))
    expected = at + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise DataError(f"{name}: {len(data):,} bytes, its header announces {expected:,} ({shape}); get it again")
    return np.frombuffer(data, np.uint8, offset=at).reshape(shape)


def read_cifar(data: bytes, label_bytes: int, name: str) -> tuple[Bytes, Bytes]:
    """Images and labels of a CIFAR binary file: records of label bytes (the last, the finest, counts) and pixels."""
    record = label_bytes + _CIFAR_PIXELS
    if not data or len(data) % record:
        raise DataError(
            f"{name}: {len(data):,} bytes, expected a multiple of {record:,} (a CIFAR record); get it again"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


def read_npz(path: Path, parts: Sequence[str] = ("train", "test")) -> tuple[Bytes, ...]:
    """train_images, train_labels, test_images and test_labels of an NPZ file, or those of some parts alone.

    Images are uint8 [N, channels, height, width], labels are integers from 0 to 255.
    """
    wanted = [f"{part}_{what}" for part in parts for what in ("images", "labels")]
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            missing = [key for key in wanted if key not in arrays]
            if missing:
                raise DataError(f"{path}: has no array {missing[0]!r}; expected {', '.join(wanted)}")
            found = {key: arrays[key] for key in wanted}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not an NPZ file of plain arrays ({error}); write it with numpy.savez") from None
    shape = found[wanted[0]].shape[1:]
    read: list[Bytes] = []
    for images, labels in zip(wanted[::2], wanted[1::2], strict=True):
        read.append(_npz_images(path, images, found[images], shape))
        read.append(_npz_labels(path, labels, found[labels], len(found[images])))
    return tuple(read)


def _npz_images(path: Path, key: str, images: npt.NDArray[np.generic], shape: tuple[int, ...]) -> Bytes:
    if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape or images.shape[1] > 64:
        raise DataError(
            f"{path}: {key} is {images.dtype} of shape {images.shape}; "
            "expected uint8 [images, channels (at most 64), height, width]"
        )
    if images.shape[1:] != shape:
        raise DataError(
            f"{path}: {key} has images of {images.shape[1:]}, the training images are {shape}; make them equal"
        )
    return images.astype(np.uint8, copy=False)


def _npz_labels(path: Path, key: str, labels: npt.NDArray[np.generic], n: int) -> Bytes:
    if labels.shape != (n,) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 255:
        raise DataError(f"{path}: {key} is {labels.dtype} of shape {labels.shape}; expected {n} integers from 0 to 255")
    return labels.astype(np.uint8)


def class_folders(folder: Path) -> list[str]:
    """The names of the classes of a folder of images: its subfolders, in alphabetical order."""
    names = sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not 2 <= len(names) <= 256:
        raise DataError(
            f"{folder} has {len(names)} subfolders; expected 2 to 256, one a class, with its PNG or JPEG files inside"
        )
    return names


def read_class_folders(
    folder: Path, classes: list[str], shape: tuple[int, int, int] = (3, SIDE, SIDE)
) -> tuple[Bytes, Bytes]:
    """The PNG and JPEG images of `folder/<class>/`, in the order of class and file name, as `read_image` has them."""
    images: list[Bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = image_paths((folder / name).glob("*"))
        if not files:
            raise DataError(f"{folder / name} has no PNG or JPEG files; expected the images of class {name!r} there")
        images.extend(read_image(path, shape) for path in files)
        labels.extend([label] * len(files))
    return np.stack(images), np.array(labels, np.uint8)


def image_paths(paths: Iterable[Path]) -> list[Path]:
    """The PNG and JPEG files among some paths, in their order by name."""
    return sorted(path for path in paths if path.suffix.lower() in _SUFFIXES and path.is_file())


def read_image(path: Path, shape: tuple[int, int, int]) -> Bytes:
    """An image file as bytes of a shape: RGB or grey, scaled so that its shorter side fits, cropped around its middle.

    One that has the height and width already keeps every pixel.
    """
    from PIL import Image, ImageOps

    channels, height, width = shape
    if channels not in _MODES:
        raise DataError(f"{path}: an image file has 1 or 3 channels, {channels} are wanted; give an .npz file instead")
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert(_MODES[channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not a readable image ({error}); replace or remove it") from None
    fitted = ImageOps.fit(upright, (width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(fitted, np.uint8).reshape(height, width, channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def enlarge(images: Bytes, side: int) -> Bytes:
    """Grey images [N, height, width], smoothly enlarged to side x side."""
    from PIL import Image

    size = (side, side)
    return np.stack([np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)) for image in images])

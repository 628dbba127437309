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

_MOST_CHANNELS = 64
_COLOURS = 4
"""So many channels at most has a picture; an axis of no more, after one of more, is one of colours."""
_CIFAR_PIXELS = 3 * 32 * 32
_MODES = {1: "L", 3: "RGB"}
"""What pictures of so many channels are called in Pillow."""
_SUFFIXES = {".png", ".jpg", ".jpeg"}


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


def read_npz(path: Path, parts: Sequence[str] = ("train", "test"), channels: int = 0) -> tuple[Bytes, ...]:
    """train_images, train_labels, test_images and test_labels of an NPZ file, or those of some parts alone.

    Images are uint8 [N, channels, height, width], or [N, height, width] in grey; where `channels` are given and come
    last, they are brought to the front. Labels are integers from 0 to 255.
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
    read: list[Bytes] = []
    for images, labels in zip(wanted[::2], wanted[1::2], strict=True):
        read.append(_npz_images(path, images, found[images], channels))
        read.append(_npz_labels(path, labels, found[labels], len(found[images])))
        if read[-2].shape[1:] != read[0].shape[1:]:
            raise DataError(
                f"{path}: {images} has images of {read[-2].shape[1:]}, the training images are {read[0].shape[1:]}; "
                "make them equal"
            )
    return tuple(read)


def _npz_images(path: Path, key: str, images: npt.NDArray[np.generic], channels: int) -> Bytes:
    shape = images.shape
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in shape:
        raise DataError(
            f"{path}: {key} is {images.dtype} of shape {shape}; expected uint8 [images, channels, height, width], "
            "or [images, height, width] in grey"
        )
    ordered = _channels_first(path, key, images[:, None] if images.ndim == 3 else images, channels)
    if ordered.shape[1] > _MOST_CHANNELS:
        raise DataError(
            f"{path}: {key} of shape {shape} has {ordered.shape[1]} channels; expected at most {_MOST_CHANNELS}"
        )
    return ordered.astype(np.uint8, copy=False)


def _channels_first(path: Path, key: str, images: npt.NDArray[np.generic], channels: int) -> npt.NDArray[np.generic]:
    """The images as they are, or turned round where the channels that were asked for come last."""
    first, last = images.shape[1], images.shape[3]
    if channels == 0 and last <= _COLOURS < first:
        raise DataError(
            f"{path}: {key} of shape {images.shape} looks like [images, height, width, channels]; set "
            f"data.channels = {last}, and they are turned round, or data.channels = {first} if channels do come first"
        )
    if channels in (0, first):
        return images
    if channels != last:
        raise DataError(
            f"{path}: {key} of shape {images.shape} has {channels} channels neither first nor last; "
            f"correct data.channels, or leave it out"
        )
    return np.moveaxis(images, 3, 1)


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


def image_paths(paths: Iterable[Path]) -> list[Path]:
    """The PNG and JPEG files among some paths, in their order by name."""
    return sorted(path for path in paths if path.suffix.lower() in _SUFFIXES and path.is_file())


def list_pictures(folder: Path, classes: list[str]) -> tuple[list[Path], Bytes]:
    """The PNG and JPEG files of `folder/<class>/`, in the order of class and file name, and their labels."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = image_paths((folder / name).glob("*"))
        if not found:
            raise DataError(f"{folder / name} has no PNG or JPEG files; expected the images of class {name!r} there")
        files.extend(found)
        labels.extend([label] * len(found))
    return files, np.array(labels, np.uint8)


def read_pictures(files: Sequence[Path], shape: tuple[int, int, int]) -> Bytes:
    """The images in these files, grey or RGB: scaled so that they fill height and width, and cropped around the middle.

    One that has the height and width already keeps every pixel. Those that cannot be read are all named in one error.
    """
    channels, height, width = shape
    if channels not in _MODES:
        raise DataError(f"an image file has 1 or 3 channels, {channels} are wanted; give an .npz file instead")
    images = np.empty((len(files), *shape), np.uint8)
    damaged = []
    for number, path in enumerate(files):
        try:
            images[number] = _picture(path, _MODES[channels], height, width)
        except DataError as error:
            damaged.append(str(error))
    if damaged:
        raise DataError(
            f"{len(damaged)} of {len(files)} images cannot be read: {', '.join(damaged)}; replace or remove them"
        )
    return images


def sizes_of(files: Sequence[Path]) -> str:
    """What images are in these files, read off their heads: sizes and colours."""
    from PIL import Image

    sizes, modes = set(), set()
    for path in files:
        with Image.open(path) as image:
            sizes.add(image.size)
            modes.add(image.mode)
    (least, most), kinds = (f(sizes, key=lambda size: size[0] * size[1]) for f in (min, max)), ", ".join(sorted(modes))
    return "x".join(map(str, least)) + ("" if least == most else f" to {'x'.join(map(str, most))}") + f" ({kinds})"


def _picture(path: Path, mode: str, height: int, width: int) -> Bytes:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} ({error})") from None
    fitted = np.asarray(ImageOps.fit(upright, (width, height), Image.Resampling.BICUBIC), np.uint8)
    return fitted.reshape(height, width, -1).transpose(2, 0, 1)


def enlarge(images: Bytes, side: int) -> Bytes:
    """Grey images [N, height, width], smoothly enlarged to side x side."""
    from PIL import Image

    size = (side, side)
    return np.stack([np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)) for image in images])

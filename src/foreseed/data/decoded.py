"""Folders of images, decoded once: what came of them is kept beside the data sets until a file changes."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from foreseed.data.formats import Bytes, read_pictures
from foreseed.data.store import data_root


def decode_once(
    folder: Path, files: Sequence[Path], channels: int, size: int, root: str | os.PathLike[str] | None = None
) -> Bytes:
    """The images in a folder's files as [N, channels, size, size]; decoded, or as they were the last time.

    What is kept counts only for files with the same names and the same content. There is one of it for each folder,
    size and number of channels, so a folder that changes takes no more room.
    """
    content = _content(folder, files)
    place = data_root(root) / "decoded" / f"{_digest(str(folder.resolve()), f'{channels}x{size}')}.npz"
    images = _kept(place, content)
    if images is None or images.shape != (len(files), channels, size, size):
        images = read_pictures(files, (channels, size, size))
        with suppress(OSError):  # no room for it: the images are here all the same
            _keep(place, content, images)
    return images


def _content(folder: Path, files: Sequence[Path]) -> str:
    """The name of what lies in the files, and of the library that reads them."""
    from PIL import __version__

    digest = hashlib.blake2b(__version__.encode(), digest_size=16)
    for path in files:
        data = path.read_bytes()
        digest.update(f"\0{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _digest(*words: str) -> str:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest()


def _kept(place: Path, content: str) -> Bytes | None:
    try:
        with open(place, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            images: Bytes | None = arrays["images"] if str(arrays["content"]) == content else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None  # nothing there, or damaged
    return images


def _keep(place: Path, content: str, images: Bytes) -> None:
    """Write it under a name of this process's own first: several may be at it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f"{place.stem}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, content=np.array(content), images=images)
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from foreseed.data import sets, store
from foreseed.data.catalog import SETS, DataFile, Entry, Package, catalogue
from tests.data.servers import FileServer, serving


@pytest.fixture(autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is kept of data sets is not the user's."""
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setenv("FORESEED_DATA", str(folder))
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    content = np.random.default_rng(7).integers(0, 256, 1_000_000, np.uint8).tobytes()
    with serving(content) as running:
        yield running


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


@dataclass
class SmallSet:
    """A data set of a few images that is entered in the catalogue under the name of a large one."""

    name: str
    files: dict[str, bytes]
    packages: dict[str, bytes]

    def put(self, folder: Path, packed: bool = False) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (self.packages if packed else self.files).items():
            (folder / name).write_bytes(content)
        return folder


Enter = Callable[[Entry], None]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Replace an entry of the catalogue for the length of a test."""

    def replace_entry(entry: Entry) -> None:
        table = catalogue([entry if entry.name == name else old for name, old in store.SETS.items()])
        monkeypatch.setattr(store, "SETS", table)
        monkeypatch.setattr(sets, "SETS", table)

    return replace_entry


def _member(name: str, content: bytes, known: bool = True) -> DataFile:
    return DataFile(name, len(content), hashlib.sha256(content).hexdigest() if known else None)


@pytest.fixture
def small_cifar(request: pytest.FixtureRequest, enter: Enter) -> SmallSet:
    """CIFAR-10 with 6 files of 3 images, or CIFAR-100 (whose files have no published SHA-256) with 2."""
    name = getattr(request, "param", "cifar10")
    rng, old = np.random.default_rng(3), SETS[name].packages[0]
    labels = 1 if name == "cifar10" else 2
    files = {}
    for number, member in enumerate(old.members):
        rows = rng.integers(0, 256, (3, labels + 3072), np.uint8)
        rows[:, :labels] = (np.arange(3) + number)[:, None] + np.arange(labels)
        files[member.name] = rows.tobytes()
    archive = tar_of({f"cifar-binary/{name}": content for name, content in files.items()})
    members = tuple(_member(member, content, labels == 1) for member, content in files.items())
    package = Package(old.name, hashlib.md5(archive).hexdigest(), (), members)
    enter(replace(SETS[name], packages=(package,)))
    return SmallSet(name, files, {old.name: archive})


@pytest.fixture
def small_mnist(enter: Enter) -> SmallSet:
    """MNIST with 6 training and 2 test images."""
    rng, files, packages = np.random.default_rng(5), {}, []
    for old, n in zip(SETS["mnist"].packages, (6, 6, 2, 2), strict=True):
        shape = (n, 28, 28) if "images" in old.name else (n,)
        header = b"\0\0\x08" + bytes([len(shape)]) + np.array(shape, ">u4").tobytes()
        name = old.members[0].name
        top = 256 if "images" in old.name else 10
        files[name] = header + rng.integers(0, top, shape, np.uint8).tobytes()
        md5 = hashlib.md5(gzip.compress(files[name], mtime=0)).hexdigest()
        packages.append(Package(old.name, md5, (), (_member(name, files[name]),)))
    enter(replace(SETS["mnist"], packages=tuple(packages)))
    return SmallSet("mnist", files, {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()})

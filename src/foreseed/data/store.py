"""Where data sets lie on disk, how they get there, and how their files are read and checked."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from foreseed.data.catalog import SETS, DataFile, Entry, Package
from foreseed.data.download import Progress, fetch
from foreseed.data.errors import DataError
from foreseed.data.files import md5_of, reading, write_whole, writing


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all data sets: the argument, else $FORESEED_DATA, else foreseed/ in the user's cache."""
    if root is not None:
        return Path(root).expanduser()
    if chosen := os.environ.get("FORESEED_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "foreseed"


def lookup(name: str) -> Entry:
    """The entry of a data set, by name."""
    if name not in SETS:
        raise DataError(f"no data set is called {name!r}: expected one of {', '.join(SETS)}")
    return SETS[name]


def where(name: str, root: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder that holds all files of a data set; None when it has yet to be got, or is built in."""
    entry = lookup(name)
    folders = [data_root(root) / entry.name]
    if entry.system_folder:
        folders.append(entry.system_folder)
    for folder in folders:
        if entry.members and all(_find(folder, member) for member in entry.members):
            return folder
    return None


def get(
    name: str,
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path | None:
    """Put a data set in its place under the root, checked; files that are already there and right are left alone.

    `source` is a file or folder on this machine to take it from instead of the network: the published archive,
    or a folder with the archives or the unpacked files. Returns the set's folder, None for a built-in set.
    """
    entry = lookup(name)
    if not entry.packages:
        return None
    folder = data_root(root) / entry.name
    for package in entry.packages:
        if all(_intact(folder, member) for member in package.members):
            continue
        if source is None:
            _install_published(package, folder, progress)
        else:
            _install_from(Path(source).expanduser(), entry, package, folder)
    return folder


def read_member(folder: Path, member: DataFile) -> bytes:
    """The content of a file of a data set, unpacked (it may lie there as .gz) and checked."""
    path = _find(folder, member)
    if path is None:
        raise DataError(f"{folder} has no {member.name}; get the data set again")
    with _damage_named(path), gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
        return _take(stream, member, path)


def _find(folder: Path, member: DataFile) -> Path | None:
    for path in (folder / member.name, folder / f"{member.name}.gz"):
        if os.path.isfile(path):
            return path
    return None


def _intact(folder: Path, member: DataFile) -> bool:
    try:
        read_member(folder, member)
    except DataError:
        return False
    return True


def _install_published(package: Package, folder: Path, progress: Progress | None) -> None:
    """Unpack the archive that a user put in the folder by hand, or download it first."""
    archive = folder / package.name
    if os.path.isfile(archive):
        _check_md5(archive, package)
        _unpack(archive, package, folder)
        return
    fetch(package.addresses, archive, package.md5, progress)
    _unpack(archive, package, folder)
    with writing(archive):
        archive.unlink()


def _install_from(source: Path, entry: Entry, package: Package, folder: Path) -> None:
    """Take a package from a file or folder on this machine."""
    if os.path.isfile(source):
        if len(entry.packages) > 1:
            names = ", ".join(p.name for p in entry.packages)
            raise DataError(f"{source} is one file and {entry.name} has several: give the folder that holds {names}")
        _unpack(source, package, folder)
        return
    if not os.path.isdir(source):
        raise DataError(f"{source}: no such file or folder; give the archive or the folder to take {entry.name} from")
    with reading(source):
        places = (source, *sorted(child for child in source.iterdir() if child.is_dir()))
    for place in places:
        if all(_find(place, member) for member in package.members):
            for member in package.members:
                write_whole(folder / member.name, read_member(place, member))
            return
        if os.path.isfile(place / package.name):
            _unpack(place / package.name, package, folder)
            return
    names = ", ".join(member.name for member in package.members)
    raise DataError(
        f"{source} holds neither {package.name} nor its files unpacked ({names}); give the folder that does"
    )


def _unpack(archive: Path, package: Package, folder: Path) -> None:
    """Put the members of a package into the folder, each checked before it gets its name."""
    if not all(member.sha256 for member in package.members):
        _check_md5(archive, package)
    with _damage_named(archive):
        if package.name.endswith(".tar.gz"):
            _unpack_tar(archive, package, folder)
            return
        (member,) = package.members
        with gzip.open(archive) as stream:
            write_whole(folder / member.name, _take(stream, member, archive))


def _unpack_tar(archive: Path, package: Package, folder: Path) -> None:
    """Only bytes leave the archive, never its paths or links: no entry can write outside the folder."""
    wanted = {member.name: member for member in package.members}
    with tarfile.open(archive) as tar:
        for info in tar:
            name = info.name.rpartition("/")[2]
            if name not in wanted or not info.isreg():
                continue
            stream = tar.extractfile(info)
            if stream:
                write_whole(folder / name, _take(stream, wanted.pop(name), archive))
    if wanted:
        raise DataError(f"{archive} lacks {', '.join(wanted)}; it is not the published {package.name}, get it again")


def _take(stream: _Readable, member: DataFile, path: Path) -> bytes:
    """Read a member and check it; never more than a byte beyond its size, however large the stream claims to be."""
    data = stream.read(member.size + 1)
    if len(data) != member.size:
        found = f"more than {member.size:,}" if len(data) > member.size else f"{len(data):,}"
        raise DataError(f"{path}: {member.name} has {found} bytes, expected {member.size:,}; get the data set again")
    if member.sha256 and (found := hashlib.sha256(data).hexdigest()) != member.sha256:
        raise DataError(f"{path}: {member.name} has SHA-256 {found}, expected {member.sha256}; get the data set again")
    return data


def _check_md5(archive: Path, package: Package) -> None:
    found = md5_of(archive)
    if found != package.md5:
        raise DataError(
            f"{archive} has MD5 {found}, the published {package.name} has {package.md5}; remove it and get it again"
        )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn what the unpackers raise on a damaged file into a sentence that names the file."""
    with reading(path):
        try:
            yield
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(f"{path} is damaged ({error}); remove it and get it again") from None

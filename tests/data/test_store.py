import gzip
import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from foreseed.data import SETS, DataError, data_root, get, where
from foreseed.data import store as store_module
from foreseed.data.store import read_member


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_the_root_is_the_argument_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORESEED_DATA", "/of/the/variable")
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/the/cache")
    assert data_root("/given") == Path("/given")
    assert data_root("~/mine") == tmp_path / "mine"
    assert data_root() == Path("/of/the/variable")
    monkeypatch.delenv("FORESEED_DATA")
    assert data_root() == Path("/of/the/cache/foreseed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == tmp_path / ".cache" / "foreseed"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match="'imagenet': expected one of digits, mnist, fashion-mnist, cifar10, cifar100"):
        get("imagenet")


def test_a_built_in_set_needs_nothing(tmp_path):
    assert get("digits", tmp_path) is None
    assert where("digits", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("small_cifar", ["cifar10", "cifar100"], indirect=True)
@pytest.mark.parametrize("way", ["archive", "folder of the archive", "unpacked", "folder of the unpacked"])
def test_a_set_is_taken_from_this_machine(small_cifar, tmp_path, way):
    place = small_cifar.put(tmp_path / "usb" / "cifar-binary", packed="archive" in way)
    source = {"archive": next(place.iterdir()), "unpacked": place, "folder of the archive": place}.get(
        way, place.parent
    )
    folder = get(small_cifar.name, tmp_path / "root", source)
    assert folder == tmp_path / "root" / small_cifar.name == where(small_cifar.name, tmp_path / "root")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == small_cifar.files


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_taken_packed_or_not(small_mnist, tmp_path, packed):
    source = small_mnist.put(tmp_path / "usb", packed)
    folder = get("mnist", tmp_path / "root", source)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == small_mnist.files


def test_idx_files_that_another_tool_packed_are_taken(small_mnist, tmp_path):
    source = tmp_path / "usb"
    source.mkdir()
    for name, content in small_mnist.files.items():
        (source / f"{name}.gz").write_bytes(gzip.compress(content, 1, mtime=1))
    assert names_in(get("mnist", tmp_path / "root", source)) == set(small_mnist.files)


def test_one_file_for_a_set_of_four_is_explained(small_mnist, tmp_path):
    source = small_mnist.put(tmp_path / "usb", packed=True)
    with pytest.raises(DataError, match=r"give the folder that holds train-images-idx3-ubyte.gz, "):
        get("mnist", tmp_path / "root", source / "train-images-idx3-ubyte.gz")


def test_a_set_is_downloaded_checked_unpacked_and_the_archive_removed(small_cifar, enter, server, tmp_path):
    server.content = small_cifar.packages["cifar-10-binary.tar.gz"]
    entry = store_module.SETS["cifar10"]
    enter(replace(entry, packages=(replace(entry.packages[0], addresses=(server.address,)),)))
    folder = get("cifar10", tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == small_cifar.files
    get("cifar10", tmp_path)
    assert len(server.requests) == 1


def test_a_damaged_file_is_got_again(small_cifar, enter, server, tmp_path):
    server.content = small_cifar.packages["cifar-10-binary.tar.gz"]
    entry = store_module.SETS["cifar10"]
    enter(replace(entry, packages=(replace(entry.packages[0], addresses=(server.address,)),)))
    folder = small_cifar.put(tmp_path / "cifar10")
    (folder / "test_batch.bin").write_bytes(bytes(3 * 3073))
    get("cifar10", tmp_path)
    assert (folder / "test_batch.bin").read_bytes() == small_cifar.files["test_batch.bin"]


def test_an_archive_put_in_place_by_hand_is_used_and_kept(small_cifar, tmp_path):
    folder = small_cifar.put(tmp_path / "cifar10", packed=True)
    get("cifar10", tmp_path)
    assert names_in(folder) == set(small_cifar.files) | {"cifar-10-binary.tar.gz"}


def test_a_damaged_archive_put_in_place_by_hand_is_named(small_cifar, tmp_path):
    archive = small_cifar.put(tmp_path / "cifar10", packed=True) / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-100])
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"{archive} has MD5 {found}, the published"):
        get("cifar10", tmp_path)


@pytest.mark.parametrize("content", [b"", b"no archive at all", gzip.compress(b"no tar")], ids=["empty", "text", "gz"])
def test_a_source_that_is_no_archive_is_named(small_cifar, tmp_path, content):
    (tmp_path / "odd.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"odd.tar.gz (is damaged|lacks data_batch_1.bin)"):
        get("cifar10", tmp_path / "root", tmp_path / "odd.tar.gz")


def test_an_archive_cut_short_is_named(small_cifar, tmp_path):
    archive = small_cifar.put(tmp_path, packed=True) / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:20_000])
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is damaged"):
        get("cifar10", tmp_path / "root", archive)


def test_an_archive_with_other_content_names_the_file_inside(small_cifar, tmp_path):
    files = {**small_cifar.files, "data_batch_3.bin": bytes(3 * 3073)}
    write_tar(tmp_path / "other.tar.gz", files)
    with pytest.raises(DataError, match=r"other.tar.gz: data_batch_3.bin has SHA-256 \w+, expected"):
        get("cifar10", tmp_path / "root", tmp_path / "other.tar.gz")


@pytest.mark.parametrize(("size", "words"), [(3073, "has 3,073 bytes"), (99_999, "has more than 9,219 bytes")])
def test_a_file_of_the_wrong_size_says_the_right_one(small_cifar, tmp_path, size, words):
    write_tar(tmp_path / "other.tar.gz", {**small_cifar.files, "data_batch_3.bin": bytes(size)})
    with pytest.raises(DataError, match=f"data_batch_3.bin {words}, expected 9,219"):
        get("cifar10", tmp_path / "root", tmp_path / "other.tar.gz")


@pytest.mark.parametrize("small_cifar", ["cifar100"], indirect=True)
def test_where_files_have_no_sum_of_their_own_the_archive_must_have_its(small_cifar, tmp_path):
    write_tar(tmp_path / "other.tar.gz", small_cifar.files)
    with pytest.raises(DataError, match=r"other.tar.gz has MD5 \w+, the published cifar-100-binary.tar.gz has"):
        get("cifar100", tmp_path / "root", tmp_path / "other.tar.gz")


def test_nothing_in_an_archive_can_write_elsewhere(small_cifar, tmp_path):
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("data_batch_1.bin", "../outside", str(tmp_path / "absolute")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "victim")
            tar.addfile(link)
        for name in ("../escaped", "/escaped", "passenger.sh"):
            add(tar, name, b"boo")
        for name, content in small_cifar.files.items():
            add(tar, f"../../{name}", content)
    folder = get("cifar10", tmp_path / "root", archive)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == small_cifar.files
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert names_in(tmp_path) == {"evil.tar.gz", "root"}
    assert names_in(tmp_path / "root") == {"cifar10"}


def test_a_source_that_lacks_the_files_says_which_are_expected(small_cifar, tmp_path):
    (tmp_path / "usb").mkdir()
    with pytest.raises(DataError, match=r"neither cifar-10-binary.tar.gz nor its files unpacked \(data_batch_1.bin, "):
        get("cifar10", tmp_path / "root", tmp_path / "usb")


def test_a_source_that_is_not_there_is_named(small_cifar, tmp_path):
    with pytest.raises(DataError, match="usb: no such file or folder"):
        get("cifar10", tmp_path / "root", tmp_path / "usb")


def test_a_root_that_cannot_be_written_is_named(small_cifar, tmp_path):
    source = small_cifar.put(tmp_path / "usb")
    (tmp_path / "root").write_text("in the way")
    with pytest.raises(DataError, match="cannot write it"):
        get("cifar10", tmp_path / "root", source)


def test_a_missing_set_is_nowhere(tmp_path):
    assert where("cifar10", tmp_path) is None


def test_a_set_with_a_file_missing_is_nowhere(small_cifar, tmp_path):
    folder = small_cifar.put(tmp_path / "cifar10")
    assert where("cifar10", tmp_path) == folder
    (folder / "data_batch_2.bin").unlink()
    assert where("cifar10", tmp_path) is None


def test_the_folder_of_a_system_package_is_found_after_ones_own(small_mnist, enter, tmp_path):
    system = small_mnist.put(tmp_path / "usr", packed=True)
    enter(replace(store_module.SETS["mnist"], system_folder=system))
    assert where("mnist", tmp_path / "root") == system
    own = small_mnist.put(tmp_path / "root" / "mnist")
    assert where("mnist", tmp_path / "root") == own


def test_fashion_mnist_is_looked_for_where_debian_puts_it():
    assert SETS["fashion-mnist"].system_folder == Path("/usr/share/datasets/fashion-mnist")


def test_reading_a_file_that_went_away_names_it(small_cifar, tmp_path):
    with pytest.raises(DataError, match=r"has no data_batch_1.bin"):
        read_member(tmp_path, SETS["cifar10"].members[0])


def add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            add(tar, name, content)

import os
import signal
import subprocess
import sys

import pytest

from foreseed.device.shard import open_shard
from foreseed.engine.errors import SamplesError


def write(path, labels, image_bytes=12):
    content = b"".join(bytes([label]) + bytes([i % 256]) * image_bytes for i, label in enumerate(labels))
    path.write_bytes(content)
    return path


def test_samples_lie_where_the_engine_looks_for_them(tmp_path):
    path = write(tmp_path / "x.bin", [2, 0, 1])
    with open_shard(path, 12, 3) as shard:
        samples = shard.samples
        data = bytes(samples.data)
        assert shard.count == samples.count == 3
        for i, label in enumerate([2, 0, 1]):
            assert data[samples.label_offset + i * samples.stride] == label
            start = samples.image_offset + i * samples.stride
            assert data[start : start + 12] == bytes([i]) * 12


def test_released_samples_can_be_read_again(tmp_path):
    path = write(tmp_path / "x.bin", [1] * 3000)
    with open_shard(path, 12, 2) as shard:
        before = bytes(shard.samples.data)
        shard.release(0, 3000)
        shard.release(1234, 5)
        shard.release(2999, 1)
        assert bytes(shard.samples.data) == before == path.read_bytes()


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 4), (3, 1), (1, 0)])
def test_only_samples_that_are_there_can_be_released(tmp_path, first, count):
    with open_shard(write(tmp_path / "x.bin", [0, 0, 0]), 12, 1) as shard, pytest.raises(SamplesError):
        shard.release(first, count)


def test_the_map_is_closed_on_leaving(tmp_path):
    with open_shard(write(tmp_path / "x.bin", [0]), 12, 1) as shard:
        pass
    with pytest.raises(ValueError, match="closed"):
        bytes(shard.samples.data)


def test_leaving_while_someone_still_looks_is_no_error(tmp_path):
    with open_shard(write(tmp_path / "x.bin", [0]), 12, 1) as shard:
        view = memoryview(shard.samples.data)
    assert view[1:].tobytes() == bytes(12)
    view.release()


def test_the_shard_cannot_be_written_through_its_samples(tmp_path):
    with open_shard(write(tmp_path / "x.bin", [0]), 12, 1) as shard, pytest.raises(TypeError):
        shard.samples.data[0] = 1


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(SamplesError, match=r"gone.bin: cannot read the shard \(No such file or directory\)"):
        open_shard(tmp_path / "gone.bin", 12, 3)


def test_a_folder_is_no_shard(tmp_path):
    with pytest.raises(SamplesError, match="cannot read the shard"):
        open_shard(tmp_path, 12, 3)


def test_an_empty_shard_is_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(SamplesError, match=r"x.bin: the shard is empty; expected records of 13 bytes"):
        open_shard(tmp_path / "x.bin", 12, 3)


@pytest.mark.parametrize("size", [1, 12, 14, 38])
def test_a_size_that_is_no_multiple_of_the_record_is_refused(tmp_path, size):
    (tmp_path / "x.bin").write_bytes(bytes(size))
    with pytest.raises(SamplesError, match=f"x.bin: {size} bytes are no whole number of records of 13 bytes"):
        open_shard(tmp_path / "x.bin", 12, 3)


def test_a_label_beyond_the_classes_is_named_with_its_sample(tmp_path):
    with pytest.raises(SamplesError, match=r"x.bin: sample 2 has label 3, expected 0 to 2"):
        open_shard(write(tmp_path / "x.bin", [0, 2, 3]), 12, 3)


PASS_OVER_A_SHARD = """
import sys
from foreseed.device.shard import open_shard

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

path, mode, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
before = peak()
with open_shard(path, 3072, 10) as shard:
    for first in range(0, shard.count, step):
        part = shard.samples.part(first, step)
        with memoryview(part.data) as view:
            sum(view[part.label_offset : part.label_offset + step * part.stride : 512])
        if mode == "release":
            shard.release(first, step)
print(peak() - before)
"""


def growth(path, mode, step):
    command = [sys.executable, "-c", PASS_OVER_A_SHARD, str(path), mode, str(step)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("step", [10, 100])
def test_a_pass_over_a_shard_hardly_counts_as_memory_in_use(tmp_path, step):
    """A pass over 31 MB grows the process by 31 MB without `release`.

    With it, the pieces of up to 2 MB in which the system maps files remain: two, where samples lie across a border.
    """
    size = 10_000 * 3073
    (tmp_path / "x.bin").write_bytes(bytes(size))
    assert growth(tmp_path / "x.bin", "release", step) < 5 << 20
    assert growth(tmp_path / "x.bin", "keep", step) > 0.9 * size


def test_reading_shards_needs_neither_numpy_nor_torch():
    code = "import sys, foreseed.device.shard; print({'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


CUT_WHILE_IT_IS_READ = """
import os, sys
from foreseed.device.shard import open_shard

path, left = sys.argv[1], int(sys.argv[2])
shard = open_shard(path, 3072, 10)
view = memoryview(shard.samples.data)
assert shard.is_current and view[-1] == 7
shard.release(0, shard.count)
os.truncate(path, left)
read = sum(view[::512])
print(shard.is_current, read, view[0])
view.release()
shard.close()
"""


@pytest.mark.parametrize("left", [0, 1, 3073, 40 * 3073, 100 * 3073 - 1])
def test_a_shard_cut_short_while_it_is_read_gives_zeros_and_is_known_to_be_another(tmp_path, left):
    (tmp_path / "x.bin").write_bytes(bytes([7]) * (100 * 3073))
    command = [sys.executable, "-c", CUT_WHILE_IT_IS_READ, str(tmp_path / "x.bin"), str(left)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    is_current, read, first = done.stdout.split()
    whole = 7 * len(range(0, 100 * 3073, 512))
    assert is_current == "False"
    assert int(read) <= whole - 7 * (whole > 7 and left < 99 * 3073)
    assert first == ("7" if left else "0")


ANOTHER_MAP = """
import mmap, os, sys
from foreseed.device.shard import open_shard

shard = open_shard(sys.argv[1], 12, 3)
with open(sys.argv[2], "r+b") as file:
    other = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(sys.argv[2], 0)
other[0]
"""


def test_a_bus_error_elsewhere_is_none_of_a_shard_s_business(tmp_path):
    (tmp_path / "other").write_bytes(bytes(5000))
    shard = write(tmp_path / "x.bin", [0, 1])
    done = subprocess.run([sys.executable, "-c", ANOTHER_MAP, str(shard), str(tmp_path / "other")])
    assert done.returncode == -signal.SIGBUS


@pytest.mark.parametrize("how", ["write", "replace", "touch", "remove"])
def test_a_file_that_is_no_longer_the_same_is_known(tmp_path, how):
    path = write(tmp_path / "x.bin", [0, 1])
    with open_shard(path, 12, 3) as shard:
        assert shard.is_current
        if how == "write":
            with open(path, "r+b") as file:
                file.write(b"\1")
        elif how == "replace":
            write(tmp_path / "y.bin", [0, 1]).replace(path)
        elif how == "touch":
            os.utime(path, (0, 0))
        else:
            path.unlink()
        assert not shard.is_current

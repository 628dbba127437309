"""A device's own samples, read where they lie on disk. Standard library only: a device loads this module."""

from __future__ import annotations

import mmap
import os

from foreseed.engine import Guard, Samples, SamplesError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import FileIO

# A page that is read brings its neighbours into the map, on both sides: Linux maps 64 KB around it, or as much as it
# holds in one piece, up to 2 MB. Released to the byte, a pass in steps of 10 images left two thirds of a shard in use.
_READ_AROUND = 2 << 20


class Shard:
    """The samples of a shard, mapped into memory; use it as a context manager, and let go of the samples inside it.

    Whatever becomes of the file, reading the samples does no harm: where the file is cut short they are 0. Who has
    computed with them asks `is_current` afterwards.
    """

    __slots__ = ("_guard", "_map", "_path", "_stamp", "samples")

    def __init__(self, path: str, samples: Samples, view: mmap.mmap, stamp: tuple[int, ...]) -> None:
        self.samples, self._map, self._path, self._stamp = samples, view, path, stamp
        self._guard = Guard(view)

    @property
    def is_current(self) -> bool:
        """Whether the samples were, up to now, those of the file: it was not written to, replaced or lost."""
        return not self._guard.lost and stamp_of(self._path) == self._stamp

    @property
    def count(self) -> int:
        """How many samples the shard has."""
        return self.samples.count

    def release(self, first: int, count: int) -> None:
        """Tell the system that these samples are not needed for now, so that they no longer count as memory in use.

        Neighbours go too; whatever is read again simply comes from the file again.
        """
        self.samples.part(first, count)  # refuses samples that are not there
        if hasattr(mmap, "MADV_DONTNEED"):
            start = max(first * self.samples.stride - _READ_AROUND, 0)
            start -= start % mmap.PAGESIZE
            end = min((first + count) * self.samples.stride + _READ_AROUND, len(self._map))
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._guard.close()
        try:
            self._map.close()
        except BufferError:
            # Someone still looks at the samples, such as a traceback: the map goes when they do.
            return


def open_shard(path: str | os.PathLike[str], image_bytes: int, classes: int) -> Shard:
    """Open a shard: records of a label byte (below `classes`) and `image_bytes` of pixels."""
    name = os.fspath(path)
    try:
        with open(name, "rb", buffering=0) as file:
            stamp = _stamp(os.fstat(file.fileno()))
            size = stamp[2]
            record = image_bytes + 1
            if size == 0:
                raise SamplesError(f"{name}: the shard is empty; expected records of {record} bytes, write it again")
            if size % record:
                raise SamplesError(
                    f"{name}: {size} bytes are no whole number of records of {record} bytes (a label and {image_bytes} "
                    "of pixels); the file is cut short or was made for another image shape"
                )
            _check_labels(name, file, size // record, record, classes)
            view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SamplesError(f"{name}: cannot read the shard ({error.strerror}); check the path") from None
    except (ValueError, IndexError):
        # The map is longer than the file, or a label could not be read.
        raise SamplesError(f"{name}: the shard was cut short while it was opened; write it again") from None
    return Shard(name, Samples.records(view, image_bytes), view, stamp)


def stamp_of(path: str) -> tuple[int, ...] | None:
    """What tells a file from any other, and from itself once it is written to; None where there is none."""
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


def _stamp(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _check_labels(name: str, file: FileIO, count: int, record: int, classes: int) -> None:
    # Read a byte at a time rather than through the map: touching every page there would count as memory in use.
    for i in range(count):
        file.seek(i * record)
        label = file.read(1)[0]
        if label >= classes:
            raise SamplesError(
                f"{name}: sample {i} has label {label}, expected 0 to {classes - 1}; "
                "the shard belongs to another data set or was made for another image shape"
            )

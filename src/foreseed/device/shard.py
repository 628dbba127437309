"""A device's own samples, read where they lie on disk. Standard library only: a device loads this module."""

from __future__ import annotations

import mmap
import os

from foreseed.engine.errors import SamplesError
from foreseed.engine.types import Samples

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import FileIO

# A page that is read brings its neighbours into the map, on both sides: Linux maps 64 KB around it, or as much as it
# holds in one piece, up to 2 MB. Released to the byte, a pass in steps of 10 images left two thirds of a shard in use.
_READ_AROUND = 2 << 20


class Shard:
    """The samples of a shard, mapped into memory; use it as a context manager, and let go of the samples inside it."""

    __slots__ = ("_map", "samples")

    def __init__(self, samples: Samples, view: mmap.mmap) -> None:
        self.samples, self._map = samples, view

    @property
    def count(self) -> int:
        """How many samples the shard has."""
        return self.samples.count

    def check(self) -> None:
        """Refuse a file that was cut short after it was opened: reading what is gone would end the process."""
        size = self._map.size()  # of the file, as it is now
        if size < len(self._map):
            raise SamplesError(
                f"the shard was cut short to {size} of {len(self._map)} bytes while it was in use; write it again, and "
                "restart the device"
            )

    def release(self, first: int, count: int) -> None:
        """Tell the system that these samples are not needed for now, so that they no longer count as memory in use.

        Neighbours go too; whatever is read again simply comes from the file again, if that is still whole.
        """
        self.check()
        self.samples.part(first, count)  # refuses samples that are not there
        if hasattr(mmap, "MADV_DONTNEED"):
            start = max(first * self.samples.stride - _READ_AROUND, 0)
            start -= start % mmap.PAGESIZE
            end = min((first + count) * self.samples.stride + _READ_AROUND, len(self._map))
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
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
            size = os.fstat(file.fileno()).st_size
            record = image_bytes + 1
            if size == 0:
                raise SamplesError(f"{name}: the shard is empty; expected records of {record} bytes, write it again")
            if size % record:
                raise SamplesError(
                    f"{name}: {size} bytes are no whole number of records of {record} bytes (a label and {image_bytes} "
                    "of pixels); the file is cut short or was made for another image shape"
                )
            _check_labels(name, file, size // record, record, classes)
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SamplesError(f"{name}: cannot read the shard ({error.strerror}); check the path") from None
    return Shard(Samples.records(view, image_bytes), view)


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

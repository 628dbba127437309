"""Checkpoints of earlier rounds, to go back to.

The last three rounds are kept; before them one in ten of the last hundred rounds, one in a hundred of the last
thousand, and so on, so that a run of ten thousand rounds keeps some thirty. A checkpoint is a new file each round, so
keeping it is a second name for it. Files that a method writes to (`KeepsFiles`) have to be copied: where there are
any, only the tenth rounds are kept, and the oldest of them go when the copies take more than 2 GiB.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from foreseed.engine.files import PARTIAL, write_whole

STATE = "state.npz"
FILES = "files"
_LAST = 3
_STEP = 10
_ROOM = 2 << 30
"""Bytes of all copies together; the newest stays, however large it is."""
_FICLONE = 0x40049409
"""Linux: let a file share another's blocks until one of them is written to, where the file system can (XFS, Btrfs)."""


def is_kept(round: int, now: int, last: int = _LAST) -> bool:
    """Whether a round's checkpoint is kept after round `now`; what is not will never be again."""
    step = _STEP
    while round % step == 0:
        if round > now - _STEP * step:
            return True
        step *= _STEP
    return round > now - last


class Kept:
    """The kept checkpoints of a run, each in a folder of its round's number."""

    def __init__(self, checkpoint: Path) -> None:
        """`checkpoint`: the run's folder of that name."""
        self._state, self._files, self._folder = checkpoint / STATE, checkpoint / FILES, checkpoint / "kept"

    def rounds(self) -> list[int]:
        """The rounds that one can go back to."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())

    def bytes_of(self, round: int) -> int:
        """What a kept checkpoint takes on the disk."""
        return sum(path.stat().st_size for path in self._at(round).rglob("*") if path.is_file())

    def keep(self, round: int) -> None:
        """Keep the checkpoint that has just been written, and let go of those that are no longer kept.

        A disk without room for a copy leaves it out: that is no reason to stop a run.
        """
        copies = _files_in(self._files)
        last = 0 if copies else _LAST
        for old in self.rounds():
            if old > round or not is_kept(old, round, last):
                self._drop(old)
        if not is_kept(round, round, last) or self._at(round).exists():
            return
        partial = self._folder / f".{round}{PARTIAL}"
        for left in self._folder.glob(f".*{PARTIAL}"):
            shutil.rmtree(left)
        try:
            partial.mkdir(parents=True)
            _name_again(self._state, partial / STATE)
            for file in copies:
                _copy(file, partial / FILES / file.relative_to(self._files))
            os.rename(partial, self._at(round))
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
        if copies:
            self._make_room()

    def put_back(self, round: int) -> None:
        """Make a kept checkpoint the run's own, and forget later ones; done twice, it is the same."""
        then = self._at(round) / FILES
        names = {file.relative_to(then) for file in _files_in(then)}
        for file in _files_in(self._files):
            if file.relative_to(self._files) not in names:
                file.unlink()
        for name in names:
            half = self._files / name.parent / f".{name.name}{PARTIAL}"
            _copy(then / name, half)
            os.replace(half, self._files / name)
        write_whole(self._state, (self._at(round) / STATE).read_bytes())
        for later in self.rounds():
            if later > round:
                self._drop(later)

    def _at(self, round: int) -> Path:
        return self._folder / str(round)

    def _drop(self, round: int) -> None:
        # Under another name first: half of a checkpoint must not look like one.
        gone = self._folder / f".{round}{PARTIAL}"
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self._at(round), gone)
        shutil.rmtree(gone)

    def _make_room(self) -> None:
        rounds = self.rounds()
        while len(rounds) > 1 and sum(map(self.bytes_of, rounds)) > _ROOM:
            self._drop(rounds.pop(0))


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _name_again(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without second names
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            shutil.copyfileobj(old, new, 1 << 20)
        new.flush()
        os.fsync(new.fileno())

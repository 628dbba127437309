"""The right to change a run's folder, for one server at a time, on a disk that several machines may see.

A lease is a file in the folder, `.lease-LINEAGE-NUMBER`. Its holder writes into it again and again; whoever finds that
it has not changed for a while takes the next number, and removes the file. So a holder that was only paused, and wakes
up, finds its file gone before it changes anything. The number is the fencing number that devices see.

What is assumed of the disk: a file can be created by one only (O_EXCL), and a file that is opened after another machine
has written or removed it is as that machine left it (NFS promises both). No two clocks are compared: silence is
measured by the clock of the one who waits. Locks (flock) count between processes of one machine only, to see at once
that a holder there is dead.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foreseed.engine import ForeseedError
from foreseed.engine.files import PARTIAL

PREFIX = ".lease-"
_NAME = re.compile(rf"{re.escape(PREFIX)}([0-9a-f]{{8}})-(\d+)")
_SILENCE = 15.0
"""Seconds without a word after which a holder is taken for lost."""
_BEATS = 10
"""Words in that time."""
_APART = 0.05
"""Seconds within which those who got into each other's way try again."""
_OVER = "over"


class LeaseError(ForeseedError):
    """A run that another server serves."""


class Lease:
    """One server's right to a run's folder; it is taken in `held`, and may be lost at any time."""

    def __init__(
        self,
        folder: Path,
        *,
        standby: bool = False,
        silence: float = _SILENCE,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`standby`: wait for as long as another server lives, rather than be refused."""
        self.folder, self.lineage, self.number = folder, secrets.token_bytes(4), 0
        """The lineage is drawn with the folder: numbers are compared within it alone."""
        self.from_silent = False
        """Whether the holder before may still be there, and have the lock of the folder."""
        self._standby, self._silence, self._say = standby, silence, say
        self._path, self._file = folder, -1
        self._lost = False
        self._released = threading.Event()

    @property
    def fence(self) -> bytes:
        """What devices compare: 4 bytes of the lineage, then 2 of the number."""
        return self.lineage + self.number.to_bytes(2, "big")

    @property
    def mark(self) -> str:
        """Part of the names of files that are being written, so that nobody finishes another's."""
        return f".{self.number}"

    @property
    def is_lost(self) -> bool:
        """Whether somebody else is known to hold it."""
        return self._lost

    def lose(self) -> None:
        """Take note that somebody else holds it."""
        self._lost = True

    def check(self) -> None:
        """Raise if somebody else holds the lease: nothing may be changed then."""
        try:
            os.close(os.open(self._path, os.O_RDONLY))
        except FileNotFoundError:
            self.lose()
        self.check_known()

    def check_known(self) -> None:
        """The same as far as it is known, without a look at the disk."""
        if self._lost:
            raise LeaseError(
                f"{self.folder}: another server has taken this run over, and this one has changed nothing since; "
                "let that one go on, or stop it and start this one again with --resume"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take the lease, from a holder that is dead or silent; refused, or waited for, while one lives."""
        while not self._take():
            time.sleep(random.uniform(0.0, _APART))
        beating = threading.Thread(target=self._beat, name="lease", daemon=True)
        beating.start()
        try:
            yield
        finally:
            self._released.set()
            beating.join()
            self._write(_OVER)
            os.close(self._file)

    def remove(self) -> None:
        """Leave nothing behind, of a run that has not begun."""
        self._path.unlink(missing_ok=True)

    def _take(self) -> bool:
        newest = max(self._leases(), default=None)
        if newest is not None:
            self._wait_for(newest[1])
            if not newest[1].exists():  # there was one after it, or it was never held
                return False
            self.lineage = newest[2]
        self.number = 1 if newest is None else newest[0] + 1
        self._path = self.folder / f"{PREFIX}{self.lineage.hex()}-{self.number}"
        try:
            self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError:  # somebody was quicker
            return False
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write("0")
        others = [(number, path) for number, path, _ in self._leases() if path != self._path]
        if any(number >= self.number for number, _ in others):  # by more than one, or as quick, for a new folder
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            return False
        for _, older in others:
            older.unlink(missing_ok=True)
        # What an earlier holder was about to put in its place.
        for partial in (*self.folder.glob(f".*{PARTIAL}"), *self.folder.glob(f"*/.*{PARTIAL}")):
            partial.unlink(missing_ok=True)
        return True

    def _leases(self) -> list[tuple[int, Path, bytes]]:
        found = [(path, _NAME.fullmatch(path.name)) for path in self.folder.iterdir()]
        return [(int(name[2]), path, bytes.fromhex(name[1])) for path, name in found if name]

    def _wait_for(self, path: Path) -> None:
        """Return when the holder is dead or silent; raise while it lives, unless we stand by."""
        told, seen, since = False, _read(path), time.monotonic()
        while not self._is_over(path, seen):
            time.sleep(self._silence / _BEATS / 2)
            if (now := _read(path)) == seen:
                if time.monotonic() >= since + self._silence:
                    self.from_silent = True
                    return
                continue
            if not self._standby and not now.startswith(_OVER):
                raise LeaseError(
                    f"{self.folder}: served by another process, {_holder(now)}; stop it, or wait with --standby"
                )
            if not told and not now.startswith(_OVER):
                told = True
                self._say(f"{self.folder}: served by {_holder(now)}; standing by")
            seen, since = now, time.monotonic()

    def _is_over(self, path: Path, seen: str) -> bool:
        """Whether the holder has let go, or was a process of this machine that is no more."""
        if not path.exists() or seen.startswith(_OVER):
            return True
        if seen.split()[1:2] != [_machine()]:
            return False
        with suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _beat(self) -> None:
        beats = 0
        while not self._released.wait(self._silence / _BEATS) and not self._lost:
            beats += 1
            with suppress(LeaseError, OSError):  # a disk that fails is told by those who write what counts
                self.check()
                self._write(str(beats))

    def _write(self, word: str) -> None:
        with suppress(OSError):
            os.pwrite(self._file, f"{word:<10} {_machine()} {socket.gethostname()} {os.getpid()}\n".encode(), 0)
            os.fsync(self._file)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return _OVER


def _holder(text: str) -> str:
    words = text.split()
    return f"process {words[3]} on {words[2]}" if len(words) > 3 else "which is about to begin"


def _machine() -> str:
    """This machine since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()

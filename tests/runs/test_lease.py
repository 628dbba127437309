"""One server at a time changes a run's folder: leases, and what becomes of those who lose theirs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foreseed.engine.files import write_whole
from foreseed.runs.lease import PREFIX, Lease, LeaseError

SILENCE = 0.5
"""Seconds, where a holder is silent."""
PATIENT = 10.0
"""Seconds, where one lives: on a busy machine it may be held up for long."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["foreseed.runs.lease"])


def leases(folder: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"{PREFIX}*")]


def another(folder: Path, silence: float = SILENCE) -> Lease:
    return Lease(folder, silence=silence)


class Holder:
    """A process that holds a folder's lease until it is killed."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=hold, args=(folder, theirs))
        self.process.start()
        assert ours.poll(300.0)
        assert ours.recv() == "held"

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def hold(folder: Path, pipe: object) -> None:
    with another(folder, PATIENT).held():
        pipe.send("held")  # type: ignore[attr-defined]
        time.sleep(600)


def test_numbers_grow_and_the_lineage_stays(tmp_path: Path) -> None:
    fences = []
    for _ in range(3):
        lease = another(tmp_path)
        with lease.held():
            lease.check()
            fences.append(lease.fence)
    assert fences == sorted(set(fences))
    assert len({fence[:4] for fence in fences}) == 1
    assert leases(tmp_path) == [3]


def test_a_second_server_is_refused_while_the_first_lives_and_told_where_it_is(tmp_path: Path) -> None:
    with Holder(tmp_path) as first:
        with (
            pytest.raises(LeaseError, match=rf"served by another process, process {first.process.pid} on .*--standby"),
            another(tmp_path, PATIENT).held(),
        ):
            pass
        assert leases(tmp_path) == [1]


def test_who_stands_by_takes_over_at_once_from_the_dead(tmp_path: Path) -> None:
    # A silence of ten minutes is not waited for: a lock tells that a process of this machine is gone.
    lease = Lease(tmp_path, silence=600.0, standby=True)
    with Holder(tmp_path) as first:
        first.send(signal.SIGKILL)
        first.process.join()
        with lease.held():
            assert (lease.number, lease.from_silent) == (2, False)


def test_who_stands_by_says_for_whom_and_takes_over_when_they_are_gone(tmp_path: Path) -> None:
    said: list[str] = []
    with Holder(tmp_path) as first:

        def say(line: str) -> None:
            said.append(line)
            first.process.kill()

        lease = Lease(tmp_path, silence=PATIENT, standby=True, say=say)
        with lease.held():
            assert not first.process.is_alive()
            assert not lease.from_silent
    assert said == [f"{tmp_path}: served by process {first.process.pid} on {socket.gethostname()}; standing by"]


def test_who_stands_by_waits_for_longer_than_a_silence_for_one_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, words, silence = 0.0, 0, 15.0
    path = tmp_path / f"{PREFIX}01234567-1"

    def sleep(seconds: float) -> None:
        """The holder, on another machine, says a word just before it would be taken for lost; in the end none."""
        nonlocal now, words
        if now + seconds >= words * 0.9 * silence and words < 5:
            words += 1
            path.write_text(f"{words:<10} another-machine there 1\n")
        now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sleep(0.0)
    lease = Lease(tmp_path, silence=silence, standby=True)
    with lease.held():
        assert lease.from_silent
        assert words == 5
        assert now >= 4 * 0.9 * silence + silence


def test_one_that_was_paused_has_lost_and_changes_nothing(tmp_path: Path) -> None:
    first = another(tmp_path)
    with first.held():
        write_whole(tmp_path / "file", b"first", fence=first)
        first._released.set()  # as if it were paused: no word of it any more
        second = another(tmp_path)
        with second.held():
            assert second.from_silent
            with pytest.raises(LeaseError, match="another server has taken this run over"):
                write_whole(tmp_path / "file", b"late", fence=first)
            assert first.is_lost
            write_whole(tmp_path / "file", b"second", fence=second)
            second.check()
        assert (tmp_path / "file").read_bytes() == b"second"
        assert not list(tmp_path.glob(".*partial"))


class PausedAfterTheCheck:
    """A fence whose holder is paused in the worst moment: its check has gone well, the file is not yet in place."""

    def __init__(self, lease: Lease, meanwhile: Callable[[], None]) -> None:
        self.mark, self._lease, self._meanwhile = lease.mark, lease, meanwhile

    def check(self) -> None:
        self._lease.check()
        self._meanwhile()


def test_a_pause_between_the_check_and_the_change_changes_nothing(tmp_path: Path) -> None:
    first, second = another(tmp_path), another(tmp_path)
    with first.held():
        first._released.set()

        def takeover() -> None:
            with second.held():
                write_whole(tmp_path / "file", b"second", fence=second)

        with pytest.raises(FileNotFoundError):
            write_whole(tmp_path / "file", b"late", fence=PausedAfterTheCheck(first, takeover))
    assert (tmp_path / "file").read_bytes() == b"second"


def test_of_many_who_want_it_one_gets_it(tmp_path: Path) -> None:
    ready, refused = threading.Barrier(8), threading.Semaphore(0)

    def attempt(_: int) -> str:
        ready.wait()
        try:
            with another(tmp_path, PATIENT).held():
                assert all(refused.acquire(timeout=300.0) for _ in range(7))
                return "held"
        except LeaseError:
            refused.release()
            return "refused"

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(attempt, range(8))) == {"held": 1, "refused": 7}

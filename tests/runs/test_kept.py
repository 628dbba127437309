"""Which checkpoints are kept: the last few, then ever fewer, and never one that was let go before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.runs import Kept, kept
from foreseed.runs.kept import is_kept


def written(folder: Path, round: int, *files: str) -> Kept:
    """A checkpoint as the run writes it, and kept."""
    folder.mkdir(exist_ok=True)
    (folder / "new").write_text(f"state {round}")
    (folder / "new").replace(folder / "state.npz")
    for name in files:
        (folder / "files").mkdir(exist_ok=True)
        (folder / "files" / name).write_text(f"{name} {round}")
    here = Kept(folder)
    here.keep(round)
    return here


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_round_that_was_let_go_never_comes_back(round: int, wait: int, longer: int) -> None:
    assert is_kept(round, round)
    if is_kept(round, round + wait + longer):
        assert is_kept(round, round + wait)


@given(st.integers(1, 20_000))
def test_few_are_kept_however_long_a_run_is_and_one_of_every_decade(now: int) -> None:
    rounds = [round for round in range(1, now + 1) if is_kept(round, now)]
    assert len(rounds) <= 3 + 10 * len(str(now))
    assert rounds[-3:] == list(range(max(1, now - 2), now + 1))
    for back in (10, 100, 1000, 10_000):
        assert now <= back or any(now - 2 * back < round <= now - back / 10 for round in rounds)


def test_the_last_rounds_and_one_in_ten_are_there_after_a_run(tmp_path: Path) -> None:
    for round in range(1, 126):
        here = written(tmp_path / "checkpoint", round)
    assert here.rounds() == [30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 123, 124, 125]
    assert not list((tmp_path / "checkpoint" / "kept").glob(".*"))


def test_going_back_brings_state_and_files_and_forgets_what_came_later(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for round in range(1, 36):
        here = written(folder, round, "memory", *(["late"] if round > 20 else []))
    assert here.rounds() == [10, 20, 30]
    for _ in range(2):  # a kill in the midst of it makes it happen twice
        here.put_back(20)
        assert (folder / "state.npz").read_text() == "state 20"
        assert [path.name for path in (folder / "files").iterdir()] == ["memory"]
        assert (folder / "files" / "memory").read_text() == "memory 20"
        assert here.rounds() == [10, 20]
    # What the method writes from now on is no longer what is kept.
    (folder / "files" / "memory").write_text("memory 21")
    here.put_back(20)
    assert (folder / "files" / "memory").read_text() == "memory 20"


def test_copies_take_bounded_room_and_the_newest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_ROOM", 45)
    for round in range(1, 61):
        here = written(tmp_path / "checkpoint", round, "memory")
    assert here.rounds() == [50, 60]  # 17 bytes each
    monkeypatch.setattr(kept, "_ROOM", 1)
    for round in range(61, 71):
        here = written(tmp_path / "checkpoint", round, "memory")
    assert here.rounds() == [70]


def test_a_disk_without_room_leaves_a_copy_out_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for round in range(1, 11):
        here = written(tmp_path / "checkpoint", round, "memory")
    monkeypatch.setattr(kept, "_copy", full)
    for round in range(11, 21):
        here = written(tmp_path / "checkpoint", round, "memory")
    assert here.rounds() == [10]
    assert [path.name for path in (tmp_path / "checkpoint" / "kept").iterdir()] == ["10"]


def test_a_disk_without_second_names_has_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    for round in range(1, 5):
        here = written(tmp_path / "checkpoint", round)
    here.put_back(3)
    assert (tmp_path / "checkpoint" / "state.npz").read_text() == "state 3"

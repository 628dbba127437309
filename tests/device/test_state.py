"""The state file: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from foreseed.device.state import RunState, StateError, load, save
from foreseed.engine import ForeseedError
from foreseed.engine.files import write_whole
from foreseed.wire import NOTHING_HELD


def held(round: int = 12, n: int = 5, vectors: int = 2) -> RunState:
    rows = [array("f", [i + j / 8 for j in range(n)]) for i in range(1 + vectors)]
    return RunState(b"run-name", 3, b"hash-of-16-bytes", b"some program", round, rows[0], rows[1:])


def fields(state: RunState | None) -> list[Any]:
    assert state is not None
    return [list(x) if name == "vectors" else x for name in RunState.__slots__ for x in [getattr(state, name)]]


def silent(line: str) -> None:
    raise AssertionError(f"said {line!r} where there is nothing to say")


@pytest.mark.parametrize("vectors", [0, 1, 2])
@pytest.mark.parametrize("round", [0, 12, 2**32 - 1])
def test_what_was_saved_is_loaded(tmp_path: Path, round: int, vectors: int) -> None:
    state = held(round, vectors=vectors)
    save(tmp_path / "x.state", state)
    assert fields(load(tmp_path / "x.state", silent)) == fields(state)


def test_values_that_mean_nothing_are_not_kept(tmp_path: Path) -> None:
    save(tmp_path / "x.state", held(NOTHING_HELD))
    found = load(tmp_path / "x.state", silent)
    assert found is not None
    assert (found.round, found.program, len(found.values), found.vectors) == (NOTHING_HELD, b"some program", 0, [])


def test_a_missing_file_is_no_state(tmp_path: Path) -> None:
    assert load(tmp_path / "x.state", silent) is None


def test_every_damaged_byte_is_noticed_and_said(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    save(path, held())
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 0x80):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            said: list[str] = []
            assert load(path, said.append) is None
            assert len(said) == 1
            assert "x.state: the state is damaged" in said[0]


def test_a_file_that_is_cut_short_or_has_more_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    save(path, held())
    whole = path.read_bytes()
    for content in (*(whole[:size] for size in range(len(whole))), whole + b"\0", whole + whole):
        path.write_bytes(content)
        said: list[str] = []
        assert load(path, said.append) is None
        assert len(said) == 1


def test_a_path_that_cannot_be_read_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot read the state \(Is a directory\); check --state") as caught:
        load(tmp_path, silent)
    assert isinstance(caught.value, ForeseedError)


def test_a_save_that_fails_leaves_the_old_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.state"
    save(path, held(12))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, held(13))
    found = load(path, silent)
    assert found is not None
    assert found.round == 12
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_from_its_pieces_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole("x.bin", b"one", bytearray(b"two"), array("f", [1.0]))
    assert Path("x.bin").read_bytes() == b"onetwo" + array("f", [1.0]).tobytes()
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "gone" / "x.bin", b"one")
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]

"""Enrolment files: who takes part under which number, decided before anybody joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreseed.fleet.enrolment import EnrolmentError, agreed, enrol, read


def test_names_get_the_lowest_free_numbers_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    assert enrol(path, ["board.7"], 1) == {"board.7": 1}
    assert enrol(path, ["a", "b"]) == {"board.7": 1, "a": 0, "b": 2}
    assert enrol(path, ["a", "c"]) == read(path) == {"board.7": 1, "a": 0, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "not TOML"),
        ("[devices]\na = 1\nb = 1\n", "a and b are both device 1"),
        ("[devices]\n'a b' = 1\n", "is no name"),
        ("[devices]\na = -1\n", "greater than or equal to 0"),
        ("[devices]\na = '1'\n", "valid integer"),
        ("[device]\na = 1\n", r"expected a table \[devices\]"),
    ],
)
def test_damaged_files_are_told(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(text)
    with pytest.raises(EnrolmentError, match=complaint):
        read(path)
    with pytest.raises(EnrolmentError, match=complaint):
        enrol(path, ["c"])
    assert path.read_text() == text


def test_what_cannot_be_enrolled_is_told_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    with pytest.raises(EnrolmentError, match="make it with foreseed fleet enrol"):
        read(path)
    enrol(path, ["a"])
    for names, number, complaint in [
        (["b"], 0, "a and b are both device 0"),
        (["a"], 1, "a is device 0 already"),
        (["b", "c"], 1, "one device a number"),
        (["no name"], None, "expected 1 to 64 letters"),
    ]:
        with pytest.raises(EnrolmentError, match=complaint):
            enrol(path, names, number)
    assert read(path) == {"a": 0}


def test_a_run_takes_no_other_numbers_than_it_has_and_knows() -> None:
    assert agreed({"a": 0, "b": 1}, {"a": 0, "left": 1}, 2) == {"a": 0, "b": 1}
    with pytest.raises(EnrolmentError, match=r"the run has 0 to 1; raise data\.devices"):
        agreed({"a": 2}, {}, 2)
    with pytest.raises(EnrolmentError, match="a is enrolled as device 1, but was device 0 in this run"):
        agreed({"a": 1}, {"a": 0}, 2)

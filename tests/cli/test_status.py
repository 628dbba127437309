"""How a fleet stands, as it is shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from foreseed.cli import main
from foreseed.runs.status import DeviceStatus, FleetStatus, write_status


def device(name: str, number: int, **known: Any) -> DeviceStatus:
    unknown = {
        "state": "ready", "enrolled": True, "awaited": False, "last_seen": time.time() - 5, "held": 4, "samples": 30,
        "peak_kib": 20_000, "sent": 5_300, "received": 12, "failures": 0, "rests_until": 0, "refused": {},
    }  # fmt: skip
    return DeviceStatus(**unknown | {"name": name, "number": number} | known)


def test_who_is_awaited_resting_refused_and_sent_away_is_shown_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = (
        device("kitchen", 0, state="asked", awaited=True),
        device("attic", 1, state="resting", failures=3, rests_until=12),
        device("cellar", 2, state="joining", enrolled=False, held=-1, samples=0, peak_kib=0, last_seen=None),
        device("[red]", 3, refused={"not finite": 2}),
    )
    status = FleetStatus(
        written=time.time() - 7300, server="stopped", run="demo", round=5, rounds=9, since=time.time() - 7310, wanted=3,
        replies=1, awaited=(0, 7), devices=devices, sent_away={"shed": "the run is full"}, refused={"late": 4},
    )  # fmt: skip
    write_status(tmp_path, status)
    assert main(["fleet", "status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "demo: no server is running, as of 2 h ago; round 5 of 9"
    assert lines[1].startswith("3 enrolled, 3 here; 1 of 3 answers, round open for ")
    assert lines[2] == "waiting for: kitchen (device 0), device 7 (nobody has joined as it)"
    assert any(line.startswith("0 kitchen awaited 4 30 20.5 MB 5.3 kB 12 B ") for line in lines)
    assert "2 cellar joining - - - 5.3 kB 12 B -" in lines
    assert "attic: rests until round 12; 3 failures in a row" in lines
    assert "cellar: not enrolled: never ready yet" in lines
    assert "[red]: refused: not finite (2)" in lines
    assert "sent away: shed: the run is full" in lines
    assert "messages that changed nothing: late (4)" in lines


def test_a_status_that_is_damaged_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_text("{")
    assert main(["fleet", "status", str(tmp_path)]) == 2
    assert "status.json: damaged" in capsys.readouterr().err

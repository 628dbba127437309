"""docs/extend/tracker.md, as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foreseed.config.tracker_registry import entered
from foreseed.simulate import run_simulated
from tests.runs.small import TINY, rows_of, stopped_and_resumed, tiny

PAGE = (Path(__file__).parents[2] / "docs" / "extend" / "tracker.md").read_text()
TRACKER, ENTERED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's file, in a folder of its own."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "csv_tracker.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def expected(folder: Path) -> list[str]:
    tested = [row for row in rows_of(folder) if row["accuracy"] is not None]
    return [f"{row['round']},{row['accuracy']},{row['loss']}" for row in tested]


def test_the_page_s_command_writes_a_line_for_every_test(module: Path, tmp_path: Path) -> None:
    (option,) = re.findall(r"--track \S+", PAGE)
    run = tmp_path / "run"
    paths = os.pathsep.join([str(module), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "foreseed.cli", "run", *TINY, *option.split(), "--out", str(run), "-q"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True)
    assert (run / "tests.csv").read_text().splitlines() == expected(run)


def test_the_page_s_tracker_goes_on_with_a_resumed_run(module: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped_and_resumed(tiny("track.to=csv_tracker:CsvTracker"), run)
    assert (run / "tests.csv").read_text().splitlines() == expected(run)
    assert len(expected(run)) == 2


def test_the_page_s_name_is_known(module: Path, tmp_path: Path) -> None:
    try:
        exec(TRACKER + ENTERED, {})
        run_simulated(tiny("track.to=csv"), tmp_path / "run")
    finally:
        entered.pop("csv", None)
    assert (tmp_path / "run" / "tests.csv").exists()

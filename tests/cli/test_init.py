"""`foreseed init` writes what can be run and changed at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foreseed.cli import main
from foreseed.config import load

NAMES = {"experiment.toml", "mynet.py", "README.md"}


def test_what_is_written_runs_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my first"
    assert main(["init", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == NAMES
    assert "cd '" in capsys.readouterr().out
    quick = ["rounds=1", "data.devices=4", "data.per_round=2", "train.k=10", "prune.pruner=random", "workers=1"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foreseed.cli", "run", "experiment.toml", *quick],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ntk-baffle trains mynet:make with 10 % of its weights on digits, 1 rounds, 2 of 4 devices" in done.stderr
    assert (folder / "runs" / "ntk-baffle" / "report.html").exists()


def test_every_key_that_is_written_has_its_trade_off(tmp_path: Path) -> None:
    main(["init", str(tmp_path)])
    assert load(tmp_path / "experiment.toml").model.name == "mynet:make"
    lines = (tmp_path / "experiment.toml").read_text().splitlines()
    assert [line for line in lines if "=" in line and not line.startswith("#") and "  # " not in line] == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mynet.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "has mynet.py already, which would be lost; give another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mynet.py"]
    assert (tmp_path / "mynet.py").read_text() == "mine"
    assert main(["init", str(tmp_path / "mynet.py" / "below")]) == 2
    assert "cannot write there (Not a directory); give another folder" in capsys.readouterr().err

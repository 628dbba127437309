"""The test-bed on this machine: real device processes in little memory end as the simulator does, or say why not."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from foreseed.cli import main
from foreseed.config import Config
from foreseed.engine import ForeseedError
from foreseed.fleet import testbed
from foreseed.fleet.devices import Table
from foreseed.runs import Progress
from tests.fleet.kills import fleet_config, simulated
from tests.simulate.small import make_world

LIMIT = 64 * 10**6


pytestmark = pytest.mark.usefixtures("quick")


def small(bars: Path, **changes: object) -> Config:
    return fleet_config(bars, **({"rounds": 3, "data__devices": 4, "data__per_round": 2} | changes))


class Notes:
    """A watch that notes what it is shown."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.said: list[str] = []
        self.states: set[str] = set()

    def progress(self, progress: Progress) -> None:
        if progress.stage == "train":
            self.rounds.append(progress.done)

    def devices(self, table: Table) -> None:
        self.states |= {device.state for device in table.values()}

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.mark.slow
@pytest.mark.parametrize("embedded", [False, True])
def test_a_test_bed_ends_with_the_weights_of_the_simulator(embedded: bool, bars: Path, tmp_path: Path) -> None:
    config, notes = small(bars), Notes()
    with testbed.Testbed(tmp_path / "bed", limit=LIMIT, embedded=embedded) as bed:
        assert bed.secure == (not embedded)
        summary = bed.run(config, notes)
    assert (tmp_path / "bed" / "ntk-baffle" / "model.fsp").read_bytes() == simulated(
        config, tmp_path / "simulated", make_world(config)
    )
    assert 2 <= summary.fleet.devices <= 4
    assert notes.rounds == [1, 2, 3]
    limited, serving, connected = notes.said
    assert "64 MB of address space (RLIMIT_AS)" in limited
    assert serving.startswith("serving ntk-baffle at mqtt")
    assert re.fullmatch(rf"{'mqtt' if embedded else 'mqtts'}://127\.0\.0\.1:\d+: connected", connected)


@pytest.mark.slow
def test_the_command_runs_both_arms_and_leaves_a_report_and_what_devices_said(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.toml"
    config.write_text(small(bars).to_toml())
    folder = tmp_path / "bed"
    assert main(["testbed", str(config), "fleet.sample=present", "--embedded", "--out", str(folder), "--quiet"]) == 0
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out.replace("\n", "")
    page = (folder / "report.html").read_text()
    assert "largest device process" in page
    assert "ntk-baffle" in page
    for arm in ("ntk-baffle", "baffle"):
        assert (folder / arm / "summary.json").exists()
        logs = [(folder / "logs" / f"{arm}-device-{number}.log").read_text() for number in range(4)]
        assert any("round 1: answered in" in log for log in logs)


def test_a_folder_that_is_not_empty_is_refused_and_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("mine")
    assert main(["testbed", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"foreseed: {tmp_path} exists and is not empty; choose another --out\n"
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.slow
def test_a_device_that_dies_of_its_limit_ends_the_test_bed_and_is_named(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.toml"
    config.write_text(small(bars).to_toml())
    options = ["--limit", "16", "--embedded", "--out", str(tmp_path / "bed"), "--quiet"]
    assert main(["testbed", str(config), *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("foreseed: ntk-baffle, round 1: a device ended with code ")
    log = said.partition("; see ")[2].partition(", or raise --limit")[0]
    assert Path(log).parent == tmp_path / "bed" / "logs"
    assert Path(log).read_text()


def test_a_device_is_held_to_its_limit_and_its_bad_end_is_told(tmp_path: Path) -> None:
    show = "import resource, sys; print(resource.getrlimit(resource.RLIMIT_AS)); sys.exit(3)"
    with testbed._Device([sys.executable, "-c", show], os.environ, tmp_path / "log", LIMIT) as device:
        device._process.wait()
        with pytest.raises(ForeseedError, match=rf"ended with code 3 when the run was over; see {tmp_path}/log"):
            device.end()
        with pytest.raises(ForeseedError, match=r"ended with code 3 in the middle of the run; see .*raise --limit"):
            device.check()
    assert (tmp_path / "log").read_text() == f"{(LIMIT, LIMIT)}\n"
    assert resource.getrlimit(resource.RLIMIT_AS) != (LIMIT, LIMIT)


def test_a_device_that_came_too_late_to_hear_of_the_run_ends_with_it(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with testbed._Device(sleeper, os.environ, tmp_path / "log", LIMIT) as device:
        device.check()
        device.end()
        assert device._process.returncode == -signal.SIGTERM


def test_a_device_that_does_not_end_is_told_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "_EXIT_TIMEOUT", 0.01)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with testbed._Device([sys.executable, "-c", deaf], os.environ, tmp_path / "log", LIMIT) as device:
        end = time.monotonic() + 300
        while not (tmp_path / "log").read_text():
            assert time.monotonic() < end
            time.sleep(0.005)
        with pytest.raises(ForeseedError, match=f"does not end although the run is over; see {tmp_path}/log"):
            device.end()
    assert device._process.returncode == -signal.SIGKILL


def test_the_arms_are_the_papers_test_bed_and_the_same_by_plain_baffle() -> None:
    first, second = testbed.arms(None, ["rounds=7"], baffle=True)
    assert (first.method, second.method) == ("ntk-baffle", "baffle")
    for arm in (first, second):
        assert (arm.rounds, arm.data.devices, arm.data.per_round, arm.train.k, arm.data.beta) == (7, 10, 2, 50, 0.1)
        assert (arm.model.name, arm.data.set) == ("lenet5", "digits")
    assert [arm.method for arm in testbed.arms(None, ["method=baffle"], baffle=True)] == ["baffle"]
    assert [arm.method for arm in testbed.arms(None, [], baffle=False)] == ["ntk-baffle"]

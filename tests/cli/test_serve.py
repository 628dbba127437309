"""`foreseed serve`, `testbed` and `fleet keys`, as a user calls them."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foreseed.cli import main
from tests.fleet.broker import free_ports

PATIENCE = 300.0
"""Seconds after which a test gives up waiting; what it waits for takes moments."""
WORDS = [
    "rounds=60", "eval_every=30", "data.devices=2", "data.per_round=1", "data.partition=iid", "train.k=2",
    "train.lr=1e-4", "prune.pruner=random", "workers=1", "fleet.sample=all",
]  # fmt: skip
# Both devices are waited for: one that finds the broker again late would otherwise miss the end of so short a run.


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without the frames and line breaks of a terminal."""
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize(
    ("command", "example", "options"),
    [
        (
            ["serve"],
            "foreseed serve demo --broker mqtts://broker.lan --ca ca.crt --cert server.crt --key",
            {"--broker", "--ca", "--cert", "--key", "--user", "--password-file", "--insecure", "--out", "--resume"},
        ),
        (
            ["testbed"],
            "foreseed testbed rounds=50 --out runs/testbed",
            {"--out", "--limit", "--embedded", "--baffle", "--json", "--quiet"},
        ),
        (
            ["fleet", "keys"],
            "foreseed fleet keys keys --count 10 --host broker.example.org",
            {"--device", "--count", "--host", "--days"},
        ),
    ],
)
def test_help_has_an_example_and_every_option(
    command: list[str],
    example: str,
    options: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main([*command, "--help"]) == 0
    text = shown(capsys)
    assert f"Example: {example}" in text
    assert options <= set(re.findall(r"--[a-z-]+", text))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake is answered with."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("foreseed: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--broker", "mqtt://broker.example.org"], "plain text; use mqtts://, or ask for it with --insecure"),
        (["--broker", "http://localhost"], "broker 'http://localhost': expected mqtts://host or mqtts://host:port"),
        (["--broker", "embedded:x"], "--broker embedded:x: expected embedded or embedded:PORT"),
        (["--broker", "embedded:65536"], "--broker embedded:65536: expected embedded or embedded:PORT"),
        (["--broker", "mqtts://localhost", "--ca", "gone.crt"], "gone.crt: cannot read it (No such file or directory)"),
        (["--broker", "mqtts://localhost", "--cert", "a.crt"], "give --cert and --key"),
        (["--broker", "mqtts://localhost", "--user", "server"], "give both --user and --password-file"),
        (["--broker", "mqtt://localhost", "--resume"], "runs/ntk-baffle: no run to resume there; start it without"),
        (["method=fedavg"], "method fedavg backpropagates, which devices cannot; expected ntk-baffle or baffle"),
        (["engine=exact"], 'engine "exact" is a simulation; real devices take engine = "difference"'),
        (["fleet.min_replies=11"], "fleet.min_replies 11 never come of data.per_round 10 devices"),
        (["fleet.sample=al"], "fleet.sample"),
        (["gone.toml"], "gone.toml"),
        (["a.toml", "b.toml"], "2 files given (a.toml, b.toml); expected one"),
        (["--resum"], "No such option: --resum"),
    ],
)  # fmt: skip
def test_a_mistake_in_serve_is_one_line_and_leaves_nothing_behind(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert complaint in refused(capsys, "serve", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert f"port {port} cannot be had" in refused(capsys, "serve", "--broker", f"embedded:{port}")


def test_a_run_folder_that_exists_is_told_before_anything_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("mine")
    said = refused(capsys, "serve", "--broker", "mqtt://localhost:9", "--out", str(tmp_path))
    assert "exists and is not empty; choose another --out, or go on with --resume" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["method=fedavg"], "method fedavg backpropagates"),
        (["a.toml", "b.toml"], "2 files given (a.toml, b.toml); expected one"),
        (["--limit", "15"], "Invalid value for '--limit'"),
    ],
)
def test_a_mistake_in_testbed_is_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert complaint in refused(capsys, "testbed", *arguments)


def test_keys_are_made_and_the_next_command_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", "keys", "keys", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    command = next(line for line in lines if line.startswith("  foreseed serve EXPERIMENT.toml"))
    words = [word for word in shlex.split(command)[1:] if word != "EXPERIMENT.toml"]
    # All that is wrong with it is that there is nothing to resume.
    assert "no run to resume" in refused(capsys, *words, "--resume")


class Process:
    """A command in a process of its own."""

    def __init__(self, output: Path, *command: str) -> None:
        self._output = output
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    @property
    def said(self) -> str:
        return self._output.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self._process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.005)

    @property
    def code(self) -> int:
        return self._process.returncode

    def end(self, number: int | None = None) -> None:
        """Send a signal, if one is given, and wait for the end."""
        if number is not None:
            self._process.send_signal(number)
        self._process.wait(PATIENCE)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def rounds_of(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


class Story:
    """A served run with two devices, as a user has it: Ctrl-C before they are there, SIGTERM in mid-run, the end."""

    def __init__(self, folder: Path) -> None:
        self.run, self._folder = folder / "my [first] run", folder
        assert main(["data", "shard", *WORDS[2:5], "--out", str(folder / "shards")]) == 0
        (port,) = free_ports(1)
        self.url = f"mqtt://127.0.0.1:{port}"
        serve = ["foreseed.cli", "serve", *WORDS, "--broker", f"embedded:{port}", "--out", str(self.run)]
        with Process(folder / "first", *serve, "--quiet") as self.first:
            self.first.until(lambda: f"{self.url}: connected" in self.first.said)
            self.first.end(signal.SIGINT)
        with self._device("kitchen", 0) as self.kitchen, self._device("attic", 1) as self.attic:
            with Process(folder / "second", *serve, "--resume") as self.second:
                self.second.until(lambda: rounds_of(self.run) >= 2)
                self.second.end(signal.SIGTERM)
            self.rounds = rounds_of(self.run)
            with Process(folder / "third", *serve, "--resume", "--json") as self.third:
                self.third.end()
            self.kitchen.end()
            self.attic.end()

    def _device(self, name: str, number: int) -> Process:
        shard, state = self._folder / "shards" / f"device-0000{number}.bin", self._folder / f"{name}.state"
        return Process(
            self._folder / name, "foreseed.device.agent", "--broker", self.url, "--name", name, "--shard", str(shard),
            "--number", str(number), "--state", str(state), "--once",
        )  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("story"))


STOPPED = "foreseed: stopped; run, compare and serve go on where they were with --resume"


@pytest.mark.slow
def test_ctrl_c_ends_a_server_with_a_line_that_says_how_to_go_on(story: Story) -> None:
    assert story.first.code == 130
    lines = story.first.said.splitlines()
    assert lines[0] == f"serving ntk-baffle at {story.url}"
    assert lines[-1] == STOPPED
    assert "Traceback" not in story.first.said


@pytest.mark.slow
def test_sigterm_ends_a_server_in_mid_run_as_ctrl_c_does(story: Story) -> None:
    assert story.second.code == 130
    assert story.second.said.splitlines()[-1] == STOPPED
    assert "Traceback" not in story.second.said
    assert 2 <= story.rounds < 60


@pytest.mark.slow
def test_a_resumed_server_ends_the_run_and_its_devices_with_it(story: Story) -> None:
    assert story.third.code == 0, story.third.said
    told = json.loads(story.third.said.splitlines()[-1])
    assert told["result"]["rounds"] == 60
    assert told["result"]["fleet"]["devices"] == 2
    assert Path(told["report"]) == story.run / "report.html"
    for device in (story.kitchen, story.attic):
        assert device.code == 0
        assert "the run is finished" in device.said.splitlines()


@pytest.mark.slow
def test_report_tells_of_the_fleet(story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my [second] report"
    assert main(["report", str(story.run), "--out", str(folder)]) == 0
    assert f"report: {folder}/report.html" in capsys.readouterr().out
    assert "largest device process" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_run_like_goes_through_the_served_run_again_to_the_bit(story: Story, tmp_path: Path) -> None:
    assert main(["run", *WORDS, "--like", str(story.run), "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert (tmp_path / "again" / "model.fsp").read_bytes() == (story.run / "model.fsp").read_bytes()


def test_a_run_like_one_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "run", *WORDS, "--like", str(tmp_path / "gone"), "--out", str(tmp_path / "run"))
    assert "gone: expected the folder of a BP-free run, with its metrics.jsonl" in said

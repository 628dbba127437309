"""Trackers are told of every round, by the real libraries read back; whatever they do, the run goes on."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.cli import main
from foreseed.config import Config, ConfigError
from foreseed.config.tracker_registry import entered
from foreseed.runs import Row, Summary, enter_tracker
from foreseed.runs.trackers import Trackers, numbers, settings
from foreseed.simulate import run_simulated
from tests.runs.small import TINY, rows_of, stop_after, stopped_and_resumed, tiny


class Recorder:
    """Writes down what it is told."""

    told: list[tuple[Any, ...]]

    def __init__(self) -> None:
        self.told = []

    def start(self, config: Config, folder: Path, done: int) -> None:
        self.told.append(("start", config.run_name, done))

    def log(self, row: Row) -> None:
        self.told.append(("log", row.round))

    def finish(self, summary: Summary | None) -> None:
        self.told.append(("finish", None if summary is None else summary.rounds))


class Failing(Recorder):
    """Fails at one of the three."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def _fail(self, here: str) -> None:
        if here == self.at:
            raise OSError("no route\nto host")

    def start(self, config: Config, folder: Path, done: int) -> None:
        self._fail("start")
        super().start(config, folder, done)

    def log(self, row: Row) -> None:
        self._fail("log")
        super().log(row)

    def finish(self, summary: Summary | None) -> None:
        self._fail("finish")
        super().finish(summary)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A tracker known as `recorder`, the same for every run."""
    one = Recorder()
    monkeypatch.setitem(entered, "recorder", lambda: one)
    return one


def test_a_tracker_is_told_of_every_round_and_of_the_end(recorder: Recorder, tmp_path: Path) -> None:
    run_simulated(tiny("track.to=recorder"), tmp_path / "run")
    assert recorder.told == [("start", "ntk-baffle", 0), *(("log", n) for n in (1, 2, 3, 4)), ("finish", 4)]


def test_a_resumed_run_goes_on_at_the_right_round(recorder: Recorder, tmp_path: Path) -> None:
    stopped_and_resumed(tiny("track.to=recorder"), tmp_path / "run")
    assert recorder.told == [
        ("start", "ntk-baffle", 0), ("log", 1), ("log", 2), ("finish", None),
        ("start", "ntk-baffle", 2), ("log", 3), ("log", 4), ("finish", 4),
    ]  # fmt: skip


def test_a_run_may_be_resumed_with_other_trackers(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_simulated(tiny(), tmp_path / "run", watch=stop_after(3))
    run_simulated(tiny("track.to=recorder"), tmp_path / "run", resume=True)
    assert recorder.told == [("start", "ntk-baffle", 3), ("log", 4), ("finish", 4)]


@pytest.mark.parametrize("at", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_named_once_and_changes_nothing(
    at: str, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(entered, "failing", lambda: Failing(at))
    with caplog.at_level(logging.WARNING, "foreseed"):
        run_simulated(tiny("track.to=failing, recorder"), tmp_path / "run")
    (said,) = caplog.messages
    assert said.startswith(f"ntk-baffle: tracker failing failed ({at}: OSError: no route to host); the run goes on")
    run_simulated(tiny(), tmp_path / "plain")
    assert (tmp_path / "run" / "model.fsp").read_bytes() == (tmp_path / "plain" / "model.fsp").read_bytes()
    assert recorder.told[-1] == ("finish", 4)


def test_a_tracker_that_never_started_is_not_finished(recorder: Recorder, tmp_path: Path) -> None:
    config = tiny("track.to=recorder")
    run_simulated(config, tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "state.npz").write_bytes(b"no checkpoint")
    recorder.told.clear()
    with pytest.raises(Exception, match="not a checkpoint"):
        run_simulated(config, tmp_path / "run", resume=True)
    assert recorder.told == []


def test_a_name_is_entered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(entered, "mine", Recorder)
    with pytest.raises(ConfigError, match="'mine' is entered twice"):
        enter_tracker("mine", Recorder)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"track.to = .*not 'tensorbord'; did you mean tensorboard\?"):
        tiny("track.to=mlflow,tensorbord")


def test_a_missing_library_is_a_sentence_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreseed.runs.trackers.find_spec", lambda name: None)
    for name, library in (("tensorboard", "tensorboardX"), ("mlflow", "mlflow"), ("wandb", "wandb")):
        with pytest.raises(ConfigError, match=rf"needs {library}.* not installed here; .*'foreseed\[{name}\]'"):
            run_simulated(tiny(f"track.to={name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["no_such_module:Tracker", "tests.runs.test_trackers:nothing", "foreseed:"])
def test_an_own_tracker_that_cannot_be_made_is_refused_before_the_run_starts(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"track.to = {name}: cannot be made"):
        run_simulated(tiny(f"track.to={name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_key_and_every_number_has_its_name() -> None:
    config = tiny("track.to=tests.runs.test_trackers:Recorder")
    assert settings(config)["train.k"] == 2
    assert settings(config)["rounds"] == 4
    Trackers(config)
    row = Row(
        round=3, lr=0.1, train_loss=2.0, devices=2, samples=9, forward_passes=1, flops=1, dense_flops=1,
        participants=(0, 1), bytes_up=1, bytes_down=1, seconds=0.5, accuracy=None, loss=None, ema_accuracy=None,
        ema_loss=None, refused={"late": 2}, snr=-0.25, remembered=0.5,
    )  # fmt: skip
    found = numbers(row)
    assert (found["refused.late"], found["snr"], found["remembered"]) == (2, -0.25, 0.5)
    assert not {"snr", "remembered"} & set(numbers(row.model_copy(update={"snr": None, "remembered": None})))
    assert not {"accuracy", "participants", "wire_up"} & set(found)


def test_the_command_line_tells_trackers(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *TINY, "--track", "recorder", "--out", str(tmp_path / "run"), "-q"]) == 0
    arms = ["--methods", "ntk-baffle,baffle", "--track", "recorder", "--out", str(tmp_path / "both"), "-q"]
    assert main(["compare", *TINY, "rounds=1", *arms]) == 0
    assert [told[1] for told in recorder.told if told[0] == "start"] == ["ntk-baffle", "ntk-baffle", "baffle"]
    capsys.readouterr()
    assert main(["serve", *TINY, "--track", "recrder", "--out", str(tmp_path / "served")]) == 2
    assert "did you mean recorder?" in capsys.readouterr().err


# The real libraries, written to a folder and read back.


def tracked_rows(folder: Path) -> dict[str, dict[int, float]]:
    """What a tracker should know: every number but the clock's, by name and round."""
    known: dict[str, dict[int, float]] = {}
    for row in rows_of(folder):
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("round", "seconds"):
                known.setdefault(name, {})[row["round"]] = value
    return known


def events(folder: Path) -> Iterator[Any]:
    """The events of TensorBoard files: a length and its checksum, a message and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length


def test_tensorboard_files_hold_every_row(tmp_path: Path) -> None:
    stopped_and_resumed(tiny("track.to=tensorboard"), tmp_path / "run")
    known: dict[str, dict[int, float]] = {}
    texts, purged = set(), []
    for event in events(tmp_path / "run" / "tensorboard"):
        if event.session_log.status:
            purged.append(event.step)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                known.setdefault(value.tag, {})[event.step] = value.simple_value
            else:
                texts.add(value.tag.partition("/")[0])
    assert list(known.pop("seconds")) == [1, 2, 3, 4]
    expected = tracked_rows(tmp_path / "run")
    assert {name: {n: float(np.float32(v)) for n, v in rows.items()} for name, rows in expected.items()} == known
    assert texts == {"config", "summary"}
    assert purged == [3]


def test_runs_in_one_folder_stand_side_by_side_in_tensorboard(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    config = tiny("track.to=tensorboard", "rounds=1").with_({"track.folder": str(shared)})
    for name in ("a", "b"):
        run_simulated(config.with_({"name": name}), tmp_path / name)
    assert {path.parent.name for path in shared.rglob("events.*")} == {"a", "b"}
    assert not (tmp_path / "a" / "tensorboard").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # SQLAlchemy 2.1, of MLflow's own tables
def test_mlflow_holds_every_row_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    summary = stopped_and_resumed(tiny("track.to=mlflow", "track.project=trial"), tmp_path / "run")

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("trial")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "ntk-baffle"
    assert run.info.status == "FINISHED"
    assert run.data.params["train.k"] == "2"
    assert run.data.metrics["summary.final_accuracy"] == summary.final_accuracy
    for name, rows in tracked_rows(tmp_path / "run").items():
        history = client.get_metric_history(run.info.run_id, name)
        assert {metric.step: metric.value for metric in history} == rows


@pytest.mark.slow
def test_wandb_offline_holds_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    summary = stopped_and_resumed(tiny("track.to=wandb"), tmp_path / "run")

    import wandb

    wandb.teardown()
    known, last, ids = read_wandb(tmp_path / "run" / "wandb")
    assert list(known.pop("seconds")) == [1, 2, 3, 4]
    assert known == tracked_rows(tmp_path / "run")
    assert last["summary.final_accuracy"] == summary.final_accuracy
    assert ids == {(tmp_path / "run" / "track" / "wandb").read_text()}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The messages of a W&B file: LevelDB's log, in blocks of 32 KiB, after a head of 7 bytes."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a record's head
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, Any], set[str]]:
    """Rows by name and round, the summary, and the runs' ids, of what `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    known: dict[str, dict[int, float]] = {}
    last: dict[str, Any] = {}
    ids = set()
    for file in sorted(folder.glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in wandb_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            for item in record.summary.update:
                last[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if not name.startswith("_"):
                    known.setdefault(name, {})[items["_step"]] = value
    return known, last, ids

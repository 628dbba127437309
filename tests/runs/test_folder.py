"""A run folder is read whole or refused with one sentence that names the file."""

import json
import math

import pytest

from foreseed.runs import Row, RunFolderError, read_run
from foreseed.runs.records import to_json
from tests.report.runs import edit_metrics, edit_summary, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", rounds=10)


def test_a_run_is_read_as_it_was_written(run):
    read = read_run(run)
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r.accuracy for r in read.rounds] == [row["accuracy"] for row in written]
    assert read.flops_so_far[-1] == pytest.approx(sum(row["flops"] for row in written))
    assert read.bytes_so_far[1] == sum(row["bytes_up"] + row["bytes_down"] for row in written[:2])
    assert read.summary.total.seconds == json.loads((run / "summary.json").read_text())["total"]["seconds"]
    assert read.config["train"]["lr"] == 0.01
    assert read.environment["machine"]["cores"] == 8


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_written_and_read_as_such(run, loss):
    row = read_run(run).rounds[-1].model_copy(update={"train_loss": loss, "loss": loss})
    again = Row.model_validate_json(to_json(row))
    assert [str(again.train_loss), str(again.loss)] == [str(loss)] * 2


def damage(name, text):
    return lambda run: (run / name).write_text(text)


def cut_metrics(run):
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))


def half_a_line(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text()[:-30])


DAMAGES = {
    "no summary": (lambda run: (run / "summary.json").unlink(), "has not finished"),
    "summary not JSON": (damage("summary.json", "{"), r"summary\.json: damaged"),
    "summary not an object": (damage("summary.json", "[]"), r"summary\.json: damaged"),
    "summary lacks a key": (lambda run: edit_summary(run, total={}), r"summary\.json: damaged \(total\.flops: Field"),
    "summary has words for a number": (lambda run: edit_summary(run, n_live="many"), r"\(n_live: Input should be"),
    "accuracy in percent": (lambda run: edit_summary(run, final_accuracy=93.4), r"final_accuracy: .*less than"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), r"metrics\.jsonl: this file .* is missing"),
    "empty metrics": (damage("metrics.jsonl", ""), r"metrics\.jsonl: damaged \(it is empty"),
    "half a line": (half_a_line, "line 10: Invalid JSON"),
    "rounds missing": (cut_metrics, "ends at round 8"),
    "rounds out of order": (
        lambda run: edit_metrics(run, round=lambda row: {1: 2, 2: 1}.get(row["round"], row["round"])), "out of order"
    ),
    "nothing evaluated": (lambda run: edit_metrics(run, accuracy=lambda row: None), "no round was evaluated"),
    "config not TOML": (damage("config.toml", "= 3"), r"config\.toml: damaged"),
    "no environment": (lambda run: (run / "env.json").unlink(), r"env\.json: this file .* is missing"),
    "bytes that are not text": (lambda run: (run / "env.json").write_bytes(b"\xff\xfe"), r"env\.json: damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_one_clear_error(run, name):
    harm, message = DAMAGES[name]
    harm(run)
    with pytest.raises(RunFolderError, match=message) as caught:
        read_run(run)
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_folder_of_runs_are_told_apart(tmp_path, run):
    with pytest.raises(RunFolderError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"holds runs \(run\); name those"):
        read_run(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="not a run folder"):
        read_run(tmp_path / "empty")

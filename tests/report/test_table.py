"""The numbers as rows, in words and on a terminal."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from foreseed.report import console_table, summary_table
from foreseed.report.arms import Stat
from foreseed.report.table import Line
from foreseed.report.words import amount, count, duration, listed, percent
from tests.report.runs import edit_summary, write_run


def printed(runs, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(console_table(runs))
    return console.file.getvalue().replace("\u00a0", " ")


def test_rows_are_the_summaries(tmp_path):
    run = write_run(tmp_path / "run", rounds=10, ema=True)
    summary = json.loads((run / "summary.json").read_text())
    (row,) = summary_table([run])
    assert (row.arm, row.method, row.engine) == ("ntk-baffle", "ntk-baffle", "difference")
    assert row.last_mean_accuracy.mean == summary["last_mean_accuracy"]
    assert row.final_ema_accuracy.mean == summary["final_ema_accuracy"]
    for key in ("flops", "dense_flops", "forward_passes", "bytes_up", "bytes_down", "seconds"):
        assert getattr(row, key).mean == summary["total"][key]
    for key in ("planned_bytes", "observed_bytes", "process_peak_bytes"):
        assert getattr(row, key).mean == summary["memory"][key]
    assert row.device_round_bytes_up.mean == summary["per_device_round"]["bytes_up"]
    assert json.loads(json.dumps(dataclasses.asdict(row)))["n_live"] == {"mean": summary["n_live"], "std": None}


def test_the_terminal_shows_every_arm_whole_on_eighty_columns(compared):
    text = printed(compared, 80)
    rows = summary_table(compared)
    for row in rows:
        for words in (row.arm, percent(row.final_accuracy), percent(row.last_mean_accuracy)):
            assert words.replace("\u00a0", " ") in text
    assert text.count("difference, ") == 2
    assert text.count("backprop, ") == 1
    assert "mean ± standard deviation over seeds" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_single_run_on_the_terminal_has_no_spread_and_shows_its_averaged_weights(tmp_path):
    run = write_run(tmp_path / "run", rounds=10, ema=True)
    edit_summary(run, final_ema_accuracy=0.5)
    text = printed([run], 80)
    assert "EMA 50.0 %" in text
    assert "±" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (percent(Stat(0.9344, 0.0051)), "93.4 ± 0.5 %"),
        (percent(Stat(1.0, None)), "100.0 %"),
        (percent(None), "–"),
        (amount(Stat(0, None), "B"), "0 B"),
        (amount(Stat(999, None), "B"), "999 B"),
        (amount(Stat(999.9, None), "B"), "1.00 kB"),
        (amount(Stat(12_345, None), "B"), "12.3 kB"),
        (amount(Stat(2.5, None), "B"), "2.50 B"),
        (amount(Stat(1.24e12, 0.03e12), "FLOP"), "1.24 ± 0.03 TFLOP"),
        (amount(Stat(6.9e21, None)), "6,900 E"),
        (amount(Stat(41, None)), "41"),
        (amount(None, "B"), "–"),
        (count(Stat(6425, None)), "6,425"),
        (count(None), "–"),
        (duration(Stat(4.21, None)), "4.2 s"),
        (duration(Stat(90, 30)), "1.5 ± 0.5 min"),
        (duration(Stat(5400, None)), "1.5 h"),
        (duration(None), "–"),
        (listed(["a"]), "a"),
        (listed(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_numbers_are_written_for_readers(words, expected):
    assert words.replace("\u00a0", " ") == expected


def test_the_best_of_several_arms_is_marked_and_a_tie_of_all_is_not(tmp_path):
    runs = [write_run(tmp_path / m, m, rounds=5) for m in ("ntk-baffle", "baffle", "fedavg")]
    rows = summary_table(runs)
    accuracy = Line("", lambda r: r.final_accuracy, percent, "higher").cells(rows)
    observed = Line("", lambda r: r.observed_bytes, amount, "lower").cells(rows)
    rounds = Line("", lambda r: r.rounds, count, "lower").cells(rows)
    assert [cell.best for cell in accuracy] == [False, False, True]
    assert [cell.best for cell in observed] == [True, False, False]
    assert not any(cell.best for cell in rounds)
    assert Line("", lambda r: r.final_ema_accuracy, percent, optional=True).cells(rows) is None

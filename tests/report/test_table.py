"""The numbers as rows, in words and on a terminal."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from foreseed.report import console_table, summary_table
from foreseed.report.arms import Stat, group
from foreseed.report.table import Line, parts, summary_row
from foreseed.report.words import amount, count, duration, listed, percent, ratio
from foreseed.runs import Summary, read_run
from foreseed.runs.records import Record
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
    for path in ("last_mean_accuracy", "final_ema_accuracy", "n_live"):
        assert row.numbers[path] == Stat(summary[path], None)
    for part in ("total", "per_device_round"):
        for key, value in summary[part].items():
            assert row.numbers[f"{part}.{key}"] == Stat(value, None)
    assert row.numbers["memory.observed_bytes"].mean == summary["memory"]["observed_bytes"]
    # Neither words nor lists nor what tells seeds apart.
    assert not {"name", "seed", "memory.note", "layers", "partition.sizes", "pruning.bp_free"} & set(row.numbers)
    assert json.loads(json.dumps(dataclasses.asdict(row)))["numbers"]["rounds"] == {"mean": 10, "std": None}


class Radio(Record):
    """A group of numbers that a later version may add."""

    air_bytes: int
    note: str = "not a number"


class SummaryOfTomorrow(Summary):
    """A summary with new metrics."""

    energy_seconds: float
    radio: Radio | None


def test_a_new_number_of_the_summary_is_in_every_row_and_on_the_page_without_another_edit(tmp_path):
    runs = []
    for seed, radio in enumerate((None, Radio(air_bytes=2_000), Radio(air_bytes=4_000))):
        run = read_run(write_run(tmp_path / str(seed), seed=seed, name=f"x-seed{seed}", rounds=5))
        summary = SummaryOfTomorrow(**dict(run.summary), energy_seconds=2 + seed, radio=radio)
        runs.append(dataclasses.replace(run, summary=summary))
    rows = [summary_row(arm) for arm in group(runs)]
    (numbers,) = (row.numbers for row in rows)
    assert numbers["energy_seconds"] == Stat(3, 1)
    assert numbers["radio.air_bytes"] == Stat(3_000, pytest.approx(2_000 / 2**0.5))
    ((title, lines),) = parts(rows)[-1:]
    assert title == "Other numbers"
    said = {label: cells[0].text.replace("\u00a0", " ") for label, cells in lines}
    assert said == {"energy_seconds": "3.0 ± 1.0 s", "radio.air_bytes": "3.00 ± 1.41 kB"}


def test_every_number_of_a_summary_of_today_has_its_words(compared):
    assert "Other numbers" not in [title for title, _ in parts(summary_table(compared))]


def test_numbers_of_real_devices_are_in_their_units(tmp_path):
    run = write_run(tmp_path / "run", rounds=5)
    edit_summary(
        run,
        fleet={"devices": 20, "device_peak_mb": 20.5, "device_peaks_kib": {"a": 9}, "refused": {"late": 1},
               "wire_up_bytes": 1_000, "wire_down_bytes": 2_000, "payload_up_bytes": 1, "payload_down_bytes": 1,
               "round_overhead_ms": 21},
    )  # fmt: skip
    *_, (title, lines) = parts(summary_table([run]))
    assert title == "Real devices"
    assert [cell.text.replace("\u00a0", " ") for _, (cell,) in lines] == ["1.00 kB", "2.00 kB", "20.5 MB", "21.0 ms"]


def test_estimates_are_told_of_arms_that_have_them(tmp_path):
    runs = [write_run(tmp_path / m, m, rounds=5) for m in ("ntk-baffle", "fedavg")]
    edit_summary(runs[0], estimates={"snr": 0.0123, "remembered": 0.4})
    lines = dict(parts(summary_table(runs)))["Estimates, last quarter of the rounds"]
    said = {label: [cell.text.replace("\u00a0", " ") for cell in cells] for label, cells in lines}
    assert said == {
        "signal to noise of a round": ["0.012", "–"],
        "of what the server remembers, counted": ["40.0 %", "–"],
    }


def test_devices_own_models_are_told_of_arms_that_have_them(tmp_path):
    runs = [write_run(tmp_path / m, m, rounds=5) for m in ("baffle", "fedavg")]
    edit_summary(runs[1], personal_accuracy=0.987, personal_density=0.25)
    told = dict(parts(summary_table(runs)))
    said = {
        label: [cell.text.replace("\u00a0", " ") for cell in cells] for lines in told.values() for label, cells in lines
    }
    assert said["of devices' own models, each on its own images"] == ["–", "98.7 %"]
    assert said["density of devices' own models"] == ["–", "25.0 %"]
    assert "own 98.7 %" in printed(runs, 80)


def test_the_terminal_shows_every_arm_whole_on_eighty_columns(compared):
    text = printed(compared, 80)
    rows = summary_table(compared)
    for row in rows:
        for words in (row.arm, percent(row.numbers["final_accuracy"]), percent(row.numbers["last_mean_accuracy"])):
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
        (ratio(Stat(0.00123, None)), "0.0012"),
        (ratio(Stat(-0.141, 0.02)), "-0.14 ± 0.02"),
        (ratio(Stat(3.21, None)), "3.2"),
        (ratio(Stat(1234.5, None)), "1,234"),
        (ratio(Stat(0, None)), "0"),
        (ratio(None), "–"),
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
    accuracy = Line("", "final_accuracy", "higher").cells(rows)
    observed = Line("", "memory.observed_bytes", "lower").cells(rows)
    rounds = Line("", "rounds", "lower").cells(rows)
    assert [cell.best for cell in accuracy] == [False, False, True]
    assert [cell.best for cell in observed] == [True, False, False]
    assert not any(cell.best for cell in rounds)
    assert Line("", "final_ema_accuracy").cells(rows) == []

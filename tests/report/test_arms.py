"""Runs that differ in their seed alone become one arm, with the right numbers."""

import statistics

import pytest

from foreseed.report import summary_table
from foreseed.report.arms import Stat, base_name, group
from foreseed.report.read import read_runs
from foreseed.runs import read_run
from tests.report.runs import edit_metrics, edit_summary, write_run


def test_seeds_are_averaged_with_their_sample_deviation(tmp_path):
    runs = [write_run(tmp_path / str(s), "baffle", s, name=f"baffle-s{s}", rounds=10) for s in (0, 1, 2)]
    for run, accuracy, loss in zip(runs, (0.90, 0.92, 0.97), (1.0, 2.0, 6.0), strict=True):
        edit_summary(run, final_accuracy=accuracy)
        edit_metrics(run, loss=lambda row, loss=loss: loss if row["accuracy"] is not None else None)
    (row,) = summary_table(runs)
    assert row.arm == "baffle"
    assert row.seeds == (0, 1, 2)
    assert row.numbers["final_accuracy"].mean == pytest.approx(0.93)
    assert row.numbers["final_accuracy"].std == pytest.approx(statistics.stdev([0.90, 0.92, 0.97]))
    (arm,) = group(read_runs(runs))
    curve = arm.curve("loss")
    assert curve.rounds.tolist() == [5, 10]
    assert curve.mean.tolist() == [3, 3]
    assert curve.std == pytest.approx([statistics.stdev([1, 2, 6])] * 2)
    assert curve.flops[-1] == pytest.approx(statistics.mean(run.summary.total.flops for run in arm.runs))


def test_mean_does_not_depend_on_the_order_of_the_seeds():
    values = [2.0**120, 2.0**60, 1.0, -(2.0**120), -(2.0**60)]
    assert sum(values) != 1
    assert Stat.of(values) == Stat.of(sorted(values))
    assert Stat.of(values).mean == 1 / len(values)


def test_a_single_seed_has_no_deviation(tmp_path):
    run = write_run(tmp_path / "run", rounds=10)
    (row,) = summary_table([run])
    assert row.numbers["final_accuracy"] == Stat(read_run(run).summary.final_accuracy, None)
    (arm,) = group(read_runs([run]))
    assert arm.curve("accuracy").std is None


def test_numbers_that_some_seeds_lack_are_averaged_over_the_others(tmp_path):
    runs = [write_run(tmp_path / str(s), seed=s, name=f"x-seed{s}", rounds=10, process=s > 0) for s in (0, 1)]
    (row,) = summary_table(runs)
    assert row.numbers["memory.process_peak_bytes"] == Stat(19_400_000, None)
    assert "final_ema_accuracy" not in row.numbers


@pytest.mark.parametrize(
    ("name", "seed", "base"),
    [("x-seed3", 3, "x"), ("x-s3", 3, "x"), ("x_seed_12", 12, "x"), ("x seed=0", 0, "x"), ("x-seed3", 4, "x-seed3"),
     ("lenets3", 3, "lenets3"), ("k=50", 50, "k=50"), ("x-s13", 3, "x-s13")],
)  # fmt: skip
def test_only_a_suffix_that_tells_the_own_seed_is_taken_off(tmp_path, name, seed, base):
    summary = read_run(write_run(tmp_path / "run", seed=seed, name=name, rounds=5)).summary
    assert base_name(summary) == base


def test_other_settings_make_other_arms_with_names_that_tell_them_apart(tmp_path):
    runs = [
        write_run(tmp_path / "a", lr=0.01, rounds=5),
        write_run(tmp_path / "b", lr=0.03, rounds=5),
        write_run(tmp_path / "c", lr=0.03, seed=1, rounds=5),
        write_run(tmp_path / "d", "fedavg", rounds=5),
    ]
    arms = group(read_runs(runs))
    assert [arm.label for arm in arms] == ["ntk-baffle (lr 0.01)", "ntk-baffle (lr 0.03)", "fedavg"]
    assert [arm.seeds for arm in arms] == [(0,), (0, 1), (0,)]


def test_the_same_seed_twice_is_not_a_second_sample(tmp_path):
    runs = [write_run(tmp_path / name, rounds=5) for name in ("first", "again")]
    assert [row.arm for row in summary_table(runs)] == ["ntk-baffle (first)", "ntk-baffle (again)"]


def test_arms_that_differ_in_much_are_named_by_their_folders_and_equal_folders_are_numbered(tmp_path):
    runs = [
        write_run(tmp_path / "a" / "run", rounds=5),
        write_run(tmp_path / "b" / "run", rounds=6, lr=0.1, density=0.5),
    ]
    assert [row.arm for row in summary_table(runs)] == ["ntk-baffle (run) #1", "ntk-baffle (run) #2"]

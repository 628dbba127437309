"""Sweeps: which settings they try, that each is run once, and how they are ranked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.cli import main
from foreseed.config import ConfigError
from foreseed.runs import read_run
from foreseed.sweep import make_points, parse_axes, run_all
from foreseed.sweep.points import Range
from tests.simulate.small import TINY, write_bars


def small(folder: Path) -> list[str]:
    bars = folder / "bars.npz"
    if not bars.exists():
        write_bars(bars)
    return [
        f"data.set={bars}", f"model.name={TINY}", "data.devices=6", "data.per_round=3", "data.min_size=4",
        "data.beta=1.0", "method=fedavg", "train.batch=8", "rounds=2", "eval_every=1",
    ]  # fmt: skip


def test_a_grid_is_every_combination_once() -> None:
    axes, plain = parse_axes(["train.lr=0.1,0.2", "rounds=3", "train.k=5,6,7"])
    assert plain == ["rounds=3"]
    found = make_points(None, axes, plain, seeds=[0, 1])
    assert len(found) == len({point.folder for point in found}) == 12
    assert {(p.config.train.lr, p.config.train.k, p.config.seed) for p in found} == {
        (lr, k, seed) for lr in (0.1, 0.2) for k in (5, 6, 7) for seed in (0, 1)
    }
    assert all(point.config.rounds == 3 for point in found)


def test_draws_stay_in_their_ranges_and_are_the_same_again() -> None:
    axes, plain = parse_axes(["train.lr=0.001..0.1", "train.k=10..20", "train.direction=gaussian,rademacher"])
    found = make_points(None, axes, plain, random=20)
    assert [p.settings for p in found] == [p.settings for p in make_points(None, axes, plain, random=20)]
    assert all(0.001 <= p.config.train.lr <= 0.1 and 10 <= p.config.train.k <= 20 for p in found)
    assert {p.config.train.direction for p in found} == {"gaussian", "rademacher"}
    # By factors: as many below the middle factor as above it, not one in eleven.
    assert 4 <= sum(p.config.train.lr < 0.01 for p in found) <= 16
    assert [p.settings for p in make_points(None, axes, plain, random=5)] == [p.settings for p in found[:5]]


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6), st.floats(0, 1, exclude_max=True))
def test_a_value_lies_between_the_ends(low: float, factor: float, share: float) -> None:
    value = float(Range(low, low * factor, whole=False).at(share))
    assert low * 0.99 <= value <= low * factor * 1.01  # three digits are written


@pytest.mark.parametrize(
    ("words", "random", "said"),
    [
        (["rounds=3"], 0, "nothing to sweep over"),
        (["train.lr=0.1..0.2"], 0, "--random 20"),
        (["train.lr=0.2..0.1"], 4, "from a lower to a higher"),
        (["train.lr=0.1,,0.2"], 0, "values that differ"),
        (["train.lr=0.1,0.1"], 0, "values that differ"),
        (["train.lr=0.1,-1"], 0, "train.lr = -1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_run(words: list[str], random: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_points(None, *parse_axes(words), random=random)


def test_each_setting_is_run_once_and_a_failure_leaves_the_others_alone(tmp_path: Path) -> None:
    axes, plain = parse_axes([*small(tmp_path), "train.lr=0.05,1e9"])
    found = make_points(None, axes, plain)
    good, bad = run_all(found, tmp_path / "sweep", jobs=2)
    assert good.summary is not None
    assert bad.summary is None
    assert "lower the learning rate" in bad.failure
    assert read_run(good.folder).summary.total == good.summary.total
    written = (good.folder / "metrics.jsonl").stat().st_mtime_ns
    told: list[int] = []
    again, _ = run_all(found[:1] * 2, tmp_path / "sweep", jobs=1, progress=lambda _, done: told.append(done))
    assert again.summary is not None
    assert again.summary.total == good.summary.total
    assert told == [1, 2]
    assert (good.folder / "metrics.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize("axes", [["train.lr=0.05,0.01", "train.momentum=0.0,0.9"], ["train.lr=0.05,0.01"]])
def test_a_sweep_is_ranked_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], axes: list[str]) -> None:
    command = ["sweep", *small(tmp_path), *axes, "--seeds", "0,1", "--out", str(tmp_path / "sweep")]
    assert main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    accuracies = [row["last_mean_accuracy"] for row in made["ranked"]]
    assert len(accuracies) == 2 ** len(axes)
    assert accuracies == sorted(accuracies, reverse=True)
    assert all(row["seeds"] == [0, 1] for row in made["ranked"])
    page = Path(made["report"]).read_text()
    assert "What was swept" in page
    lines = (tmp_path / "sweep" / "figures" / "sweep.csv").read_text().splitlines()
    assert len(lines) == 1 + len(accuracies)
    assert main(command) == 0
    assert "last five" in capsys.readouterr().out

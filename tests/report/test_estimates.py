"""How well estimates point is drawn for the arms that tell it, from what their rounds say."""

from __future__ import annotations

import csv
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from foreseed.report import write_report
from foreseed.runs import read_run
from foreseed.runs.records import Estimates
from tests.report.html import Page
from tests.report.runs import edit_metrics, leave_out_figures, write_run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_figures(monkeypatch.setattr)


def with_signal(folder: Path, method: str = "ntk-baffle", seed: int = 0, *, snr: Any = 1.0, **changes: Any) -> Path:
    """A run whose rounds tell a ratio, the same in each or by a function of the row, and other things like it."""
    run = write_run(folder, method, seed, name=f"{method}-seed{seed}", rounds=40)
    given = {"snr": snr, **changes}
    edit_metrics(run, **{key: value if callable(value) else lambda _, v=value: v for key, value in given.items()})
    return run


def following(run: Path) -> Path:
    """The run as one whose rate follows the noise; `[train]` is the last table of its file."""
    with (run / "config.toml").open("a") as file:
        file.write('rate = "noise"\n')
    return run


def drawn(runs: list[Path], out: Path) -> tuple[list[dict[str, str]], str]:
    """The rows of the figure's file and its caption."""
    page = write_report(runs, out)
    with (out / "figures" / "signal.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = Page(page.read_text(encoding="utf-8")).text
    return rows, text[text.index("Cosine between the server’s") :].partition(" Data (CSV)")[0]


def test_cosine_is_that_of_the_mean_ratio_of_twenty_rounds(tmp_path: Path) -> None:
    run = with_signal(tmp_path / "run", snr=lambda row: row["round"] / 10)
    rows, caption = drawn([run], tmp_path / "out")
    assert [int(row["round"]) for row in rows] == list(range(5, 41))
    for row in rows:
        last = [r / 10 for r in range(1, int(row["round"]) + 1)][-20:]
        mean = sum(last) / len(last)
        assert float(row["cosine"]) == pytest.approx(sqrt(mean / (1 + mean)), rel=1e-12)
        assert float(row["snr"]) == int(row["round"]) / 10
        assert row["remembered"] == ""
    # Rounds 31 to 40: a mean of 3.55.
    assert caption.endswith(": in the last quarter of the rounds 0.88.")
    assert {path.suffix for path in (tmp_path / "out" / "figures").glob("signal.*")} == {".svg", ".png", ".csv"}


def test_ratios_below_zero_are_averaged_before_they_count_as_none(tmp_path: Path) -> None:
    mixed = with_signal(tmp_path / "mixed", snr=lambda row: 1.0 if row["round"] % 2 else -0.5)
    noise = with_signal(tmp_path / "noise", "baffle", snr=-0.1)
    rows, caption = drawn([mixed, noise], tmp_path / "out")
    ends = {row["arm"]: float(row["cosine"]) for row in rows}
    assert ends == {"ntk-baffle": pytest.approx(sqrt(0.25 / 1.25)), "baffle": 0}
    assert "in the last quarter of the rounds 0.45 (ntk-baffle) and too small to tell (baffle)" in caption
    rows, caption = drawn([noise], tmp_path / "alone")
    assert {row["cosine"] for row in rows} == {"0.0"}
    assert caption.endswith(": too small to tell in the last quarter of the rounds.")


def test_one_arm_of_two_is_drawn_alone_and_named(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "old", "fedavg", rounds=40), with_signal(tmp_path / "new", remembered=0.25)]
    rows, caption = drawn(runs, tmp_path / "out")
    assert {row["arm"] for row in rows} == {"ntk-baffle"}
    assert "0.71 (ntk-baffle)" in caption
    assert "of what the server remembers, 25.0 % (ntk-baffle) counted" in caption
    svg = (tmp_path / "out" / "figures" / "signal.svg").read_text()
    assert ">ntk-baffle<" in svg
    assert ">fedavg<" not in svg


def test_rounds_that_tell_nothing_leave_the_mean_as_it_is(tmp_path: Path) -> None:
    gaps = {7: None, 8: float("inf"), 9: float("nan")}
    run = with_signal(tmp_path / "run", snr=lambda row: gaps.get(row["round"], 1.0))
    rows, _ = drawn([run], tmp_path / "out")
    assert not {str(r) for r in gaps} & {row["round"] for row in rows}
    assert [float(row["cosine"]) for row in rows] == pytest.approx([sqrt(0.5)] * len(rows))


def test_seeds_are_one_line_with_its_spread(tmp_path: Path) -> None:
    runs = [with_signal(tmp_path / str(seed), seed=seed, snr=snr) for seed, snr in enumerate((1.0, 3.0))]
    rows, _ = drawn(runs, tmp_path / "out")
    cosines = sqrt(0.5), sqrt(0.75)
    assert float(rows[-1]["cosine"]) == pytest.approx(sum(cosines) / 2)
    assert float(rows[-1]["cosine_std"]) == pytest.approx((cosines[1] - cosines[0]) / sqrt(2))
    assert (rows[-1]["seeds"], rows[-1]["snr"]) == ("2", "2.0")


def test_the_rate_is_beside_it_where_it_follows(tmp_path: Path) -> None:
    fixed, noise = with_signal(tmp_path / "fixed", "baffle"), following(with_signal(tmp_path / "noise"))
    _, caption = drawn([fixed], tmp_path / "out")
    assert "learning rate" not in caption + (tmp_path / "out" / "figures" / "signal.svg").read_text()
    rows, caption = drawn([fixed, noise], tmp_path / "both")
    assert "the learning rate follows it (ntk-baffle)" in caption
    assert ">learning rate<" in (tmp_path / "both" / "figures" / "signal.svg").read_text()
    assert float(rows[0]["lr"]) == pytest.approx(0.01 * 0.998**5)


def test_runs_that_tell_no_ratio_have_no_figure_of_it(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / m, m, rounds=10) for m in ("ntk-baffle", "fedavg")]
    page = write_report(runs, tmp_path / "out").read_text(encoding="utf-8")
    assert "Signal in the estimates" not in page
    assert not list((tmp_path / "out" / "figures").glob("signal*"))


def test_a_run_shorter_than_the_window_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=2)
    edit_metrics(run, snr=lambda row: 1.0)
    rows, _ = drawn([run], tmp_path / "out")
    assert [row["round"] for row in rows] == ["2"]


def test_estimates_of_a_run_are_means_of_its_last_quarter(tmp_path: Path) -> None:
    run = with_signal(tmp_path / "run", snr=lambda row: row["round"], remembered=lambda row: row["round"] / 64)
    assert Estimates.of(read_run(run).rounds) == Estimates(snr=35.5, remembered=35.5 / 64)
    assert Estimates.of(read_run(write_run(tmp_path / "old", rounds=8)).rounds) is None

"""`foreseed run`, `compare`, `report`, `prune` and `data`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreseed.cli import main
from tests.report.runs import leave_out_figures
from tests.simulate.small import leave_out_the_slow

TINY = [
    "rounds=2", "eval_every=1", "data.devices=4", "data.per_round=2", "train.k=2", "prune.pruner=random", "workers=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)
    leave_out_figures(monkeypatch.setattr)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that belongs to it; those of single tests do without what is slow."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["run", *TINY, "--out", str(folder), "--quiet"]) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake is answered with."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    return said[0]


def test_a_run_leaves_everything_that_it_promises(done: Path) -> None:
    wanted = (
        "config.toml", "env.json", "metrics.jsonl", "summary.json", "model.fsp", "mask.npz", "report.html",
        "figures/partition.svg", "checkpoint/state.npz",
    )  # fmt: skip
    assert [name for name in wanted if not (done / name).exists()] == []
    rows = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    summary = json.loads((done / "summary.json").read_text())
    assert summary["total"]["bytes_up"] == sum(row["bytes_up"] for row in rows)
    assert summary["memory"]["process_peak_bytes"] > summary["memory"]["planned_bytes"] > 0


def test_a_finished_run_resumes_to_itself(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (done / "model.fsp").read_bytes()
    assert main(["run", *TINY, "--out", str(done), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["rounds"] == 2
    assert (done / "model.fsp").read_bytes() == before


def test_compare_reports_on_every_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--methods", "ntk-baffle,fedavg", *TINY, "--out", str(tmp_path / "both"), "-q"]) == 0
    shown = capsys.readouterr().out
    assert "ntk-baffle" in shown
    assert "fedavg" in shown
    assert (tmp_path / "both" / "report.html").exists()


def test_compare_over_pruners_keeps_as_many_weights_in_every_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pruners = "snip,grasp,synflow,erk"
    words = [*TINY, "rounds=1", "prune.iterations=2", "prune.batch=5"]
    assert main(["compare", "--pruners", pruners, *words, "--out", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["result"]
    assert [result["pruning"]["pruner"] for result in results] == pruners.split(",")
    assert len({result["n_live"] for result in results}) == 1
    assert len({(tmp_path / name / "mask.npz").read_bytes() for name in pruners.split(",")}) == 4
    costs = [result["pruning"]["device_bytes_up"] for result in results]
    assert costs[1] == 2 * costs[0] > 0
    assert costs[2:] == [0, 0]


def test_compare_over_pruners_says_what_it_cannot_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected one of them" in refused(capsys, "compare", "--pruners", "snip,erk", "--methods", "baffle,fedavg")
    assert "one experiment file" in refused(capsys, "compare", "--pruners", "snip,erk", "demo", "demo-random")
    assert "keeps all weights" in refused(capsys, "compare", "--pruners", "snip,erk", "method=fedavg")
    assert "keeps all weights" in refused(capsys, "compare", "--pruners", "snip,erk", "prune.density=1.0")
    assert "synflow, magnitude, erk" in refused(capsys, "compare", "--pruners", "snip,snap", "demo")
    assert "which has no scores" in refused(capsys, "compare", "--pruners", "snip,erk", "prune.cost=flops")


def test_compare_with_seeds_repeats_every_arm(tmp_path: Path) -> None:
    assert main(["compare", "--seeds", "0,1", *TINY, "--methods", "baffle", "--out", str(tmp_path), "-q"]) == 0
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("baffle")} == {"baffle-s0", "baffle-s1"}


def test_report_of_a_finished_run(done: Path, tmp_path: Path) -> None:
    assert main(["report", str(done), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.html").exists()


def test_prune_writes_a_mask_and_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = tmp_path / "mask.npz"
    assert main(["prune", "prune.iterations=2", "prune.redraws=1", "--out", str(mask), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert mask.exists()
    assert found["flops"] < found["dense_flops"]
    assert "exists" in refused(capsys, "prune", "--out", str(mask))


def test_data_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--json"]) == 0
    assert "digits" in {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert main(["data", "info", "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [3, 32, 32]
    assert main(["data", "shard", "data.devices=3", "data.per_round=2", "--out", str(tmp_path)]) == 0
    shards = sorted(tmp_path.glob("device-*.bin"))
    assert len(shards) == 3
    assert sum(path.stat().st_size for path in shards) == 1437 * 3073


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("train.kk=3", "train.k"), ("train.k=0", "train.k"), ("prune.density=0", "prune.density"),
        ("prune.density=1.5", "prune.density"), ("data.beta=0", "data.beta"), ("data.per_round=99", "per_round"),
        ("method=ntk-bafle", "ntk-baffle"), ("data.set=cifar11", "cifar10"), ("model.name=lenet6", "lenet5"),
        ("prune.pruner=snop", "grasp, synflow, magnitude, erk"), ("prune.cost=bytes", "flops"),
        ("prune.cost_power=-1", "prune.cost_power"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_one_line_and_changes_nothing(
    word: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meant in refused(capsys, "run", word, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_exists_is_not_touched(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    assert "--resume" in refused(capsys, "run", *TINY, "--out", str(done))
    assert "seed cannot change" in refused(capsys, "run", *TINY, "seed=3", "--out", str(done), "--resume")
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before


def test_runs_lists_what_one_can_go_back_to_and_going_back_changes_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "runs: no run is there" in refused(capsys, "runs")
    assert main(["run", *TINY, "rounds=12", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["round"], told["rounds"]) == ("runs/ntk-baffle", "over", 12, 12)
    assert [kept["round"] for kept in told["kept"]] == [10, 11, 12]
    assert all(kept["accuracy"] is not None and kept["bytes"] > 0 for kept in told["kept"])
    assert "add --resume" in refused(capsys, "run", *TINY, "--at", "10")
    assert "there are 10, 11, 12" in refused(capsys, "run", "--resume", "--at", "3")
    assert main(["run", "--resume", "--at", "10", "train.lr=0.002", "--quiet"]) == 0
    assert main(["run", *TINY, "rounds=12", "--resume", "--quiet"]) == 0  # as it was started, which takes nothing back
    capsys.readouterr()
    assert main(["runs", "runs/ntk-baffle"]) == 0
    shown = capsys.readouterr().out
    assert "after round 10: back to round 10; rows of later rounds are in abandoned-1.jsonl" in shown
    assert "train.lr from 0.01 to 0.002" in shown
    rows = [json.loads(line) for line in Path("runs/ntk-baffle/metrics.jsonl").read_text().splitlines()]
    assert rows[9]["lr"] > 0.009
    assert rows[11]["lr"] < 0.0021


def test_data_that_is_not_there_says_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "run", "data.set=cifar10", f"data.root={tmp_path}", "--out", str(tmp_path / "run"))
    assert "foreseed data get cifar10" in said


def test_a_diverging_run_names_round_and_arm_and_keeps_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(
        capsys, "run", "--quiet", *TINY, "rounds=30", "train.lr=1e9", "name=wild", "--out", str(tmp_path / "run"), "-q"
    )
    assert "wild" in said
    assert "round" in said
    assert "learning rate" in said


@pytest.mark.parametrize("arguments", [["compare"], ["compare", "--methods", "baffle"], ["compare", "--seeds", "a,b"]])
def test_a_comparison_of_nothing_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments)


def test_a_run_says_first_what_it_will_do_and_what_else_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path / "run")]) == 0
    nothing, plan, *_ = capsys.readouterr().err.splitlines()
    assert nothing.startswith("no experiment given, so all is as by default; foreseed run demo is a tuned one")
    assert "trains lenet5 with 10 % of its weights on digits, 2 rounds, 2 of 4 devices in each; in " in plan
    assert main(["run", "demo", *TINY, "train.spread=1", "method=baffle", "--out", str(tmp_path / "dense")]) == 0
    plan, *_ = capsys.readouterr().err.splitlines()
    assert "baffle trains lenet5 on digits, 2 rounds, 2 of 4 devices in each" in plan
    assert "exists and is not empty" in refused(capsys, "run", *TINY, "--out", str(tmp_path / "run"))

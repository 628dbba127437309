"""The paper's tables and figures: every arm is an experiment that can be run, and numbers stand beside the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foreseed.cli import main
from foreseed.config import ConfigError, methods
from foreseed.meter import process
from foreseed.paper import ITEMS, PaperArm, comparison_rows, device_memories, find_item
from foreseed.runs import Summary
from tests.simulate.small import TINY, write_bars

QUICK = ["prune.iterations=1", "prune.redraws=1", "prune.batch=8"]


@pytest.mark.parametrize("item", ITEMS)
def test_every_arm_is_an_experiment_with_a_folder_of_its_own(item: str) -> None:
    arms = ITEMS[item].arms
    configs = [arm.config() for arm in arms]
    assert len({config.run_name for config in configs}) == len(arms)
    assert len({config.with_({"name": "x"}).to_toml() for config in configs}) == len(arms)


def test_figures_share_the_runs_of_their_tables() -> None:
    for figure, table in (("figure1", "table2"), ("figure2", "table3"), ("figure3", "table3"), ("figure5", "table4")):
        assert {arm.name for arm in ITEMS[figure].arms} <= {arm.name for arm in ITEMS[table].arms}


def test_overrides_hold_for_every_arm() -> None:
    config = ITEMS["table2"].arms[1].config(["rounds=7", "model.name=lenet5"])
    assert (config.rounds, config.model.name, config.method) == (7, "lenet5", "feddst")


def test_what_cannot_be_made_is_said() -> None:
    with pytest.raises(ConfigError, match="foreseed testbed"):
        find_item("figure4")
    with pytest.raises(ConfigError, match="did you mean table2"):
        find_item("table22")


def test_ratios_are_to_the_fedavg_of_the_same_model() -> None:
    def summary(method: str, model: str, flops: float, memory: int) -> Summary:
        cost = {"flops": flops, "dense_flops": 1.0, "forward_passes": 1.0, "bytes_up": 5.0, "bytes_down": 6.0}
        return Summary.model_construct(
            method=method, model=model, max_accuracy=0.5, last_mean_accuracy=0.4, density=0.2, rounds=3,
            per_device_round=Summary.model_fields["per_device_round"].annotation(**cost),
            memory=Summary.model_fields["memory"].annotation(
                planned_bytes=memory, observed_bytes=None, process_peak_bytes=None, batch=1, note=""
            ),
        )  # fmt: skip

    arms = [PaperArm(label, "demo", accuracy=1.0) for label in "abc"]
    made = [summary("feddst", "m", 30.0, 10), summary("fedavg", "m", 60.0, 40), summary("baffle", "other", 1.0, 1)]
    first, base, other = comparison_rows(arms, made)
    assert (first.flops, first.memory, base.flops, base.memory) == (0.5, 0.25, 1.0, 1.0)
    assert (other.flops, other.memory) == (None, None)
    assert (first.accuracy, first.last_accuracy, first.said["accuracy"]) == (50.0, 40.0, 1.0)


def test_memory_is_that_of_every_method_and_needs_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreseed.meter.device.process_peak_bytes", lambda *_: None)
    rows = {row.method: row for row in device_memories("table1", [*QUICK, "model.name=lenet5"])[:8]}
    assert set(rows) <= set(methods())
    dense = rows["fedavg"].memory.planned_bytes
    for name, row in rows.items():
        assert row.bp_free == (name in ("baffle", "ntk-baffle"))
        assert (row.memory.planned_bytes < dense) == row.bp_free, name
    assert [row.method for row in rows.values() if not row.prunes] == ["fedavg", "baffle"]
    assert process.process_peak_bytes is not None


def test_a_figure_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreseed.meter.device.process_peak_bytes", lambda *_: None)
    bars = write_bars(tmp_path / "bars.npz")
    small = [
        f"data.set={bars}", f"model.name={TINY}", "data.devices=6", "data.per_round=3", "data.min_size=4",
        "data.beta=1.0", "train.batch=8", "rounds=2", "eval_every=1", "train.k=4", "workers=1", *QUICK,
    ]  # fmt: skip
    command = ["reproduce", "figure2", *small, "--out", str(tmp_path / "paper"), "--json"]
    assert main(command) == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["said"]["accuracy"] for row in made["arms"]] == [46.39, 42.59, 53.20]
    assert made["arms"][2]["flops"] == 1.0
    assert np.isclose(made["arms"][0]["density"], 0.1, atol=0.05)
    assert Path(made["report"]).exists()
    before = (tmp_path / "paper" / "cifar10-lenet5-k200" / "metrics.jsonl").stat().st_mtime_ns
    assert main([*command[:-1], "--quiet"]) == 0  # what is finished is not run again
    assert (tmp_path / "paper" / "cifar10-lenet5-k200" / "metrics.jsonl").stat().st_mtime_ns == before
    assert "(46.4)" in capsys.readouterr().out
    assert main(["reproduce", "figure2", "--arms", "nobody"]) == 2
    assert "no arm of figure2" in capsys.readouterr().err
    assert main(["reproduce"]) == 0
    assert "table3" in capsys.readouterr().out

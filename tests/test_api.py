"""foreseed from Python, as a researcher uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import foreseed as fs
from foreseed.data import load_held_out
from foreseed.models import compile, restore
from tests.models.agreement import random_mask
from tests.runs.small import TINY, stop_after


def batch_norm_model(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=3, bias=False), nn.BatchNorm2d(4), nn.Hardswish(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, classes),
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fs.Result:
    return fs.run(fs.load(None, TINY), tmp_path_factory.mktemp("runs") / "tiny")


def accuracy_of_the_torch_model(result: fs.Result) -> float:
    tests = load_held_out("digits", None)
    with torch.no_grad():
        guesses = result.model()(result.inputs(tests.images)).argmax(1).numpy()
    return float((guesses == tests.labels).mean())


def test_rows_are_arrays_by_name(result: fs.Result) -> None:
    assert result["round"].tolist() == [1, 2, 3, 4]
    assert result["round"].dtype == np.int64
    assert result["train_loss"].dtype == np.float64
    assert np.isnan(result["accuracy"]).tolist() == [True, False, True, False]
    assert np.isnan(result["ema_loss"]).all()
    assert [len(taken) for taken in result["participants"]] == [2, 2, 2, 2]
    assert "accuracy" in result.keys()  # noqa: SIM118
    assert "ema_loss" not in list(result)
    with pytest.raises(KeyError, match=r"acuracy.*train_loss"):
        result["acuracy"]


def test_a_curve_leaves_out_what_was_not_tested(result: fs.Result) -> None:
    rounds, accuracies = result.curve("accuracy")
    assert rounds.tolist() == [2, 4]
    assert accuracies[-1] == result.accuracy == result.summary.final_accuracy


def test_the_torch_model_is_the_one_that_was_tested(result: fs.Result) -> None:
    assert accuracy_of_the_torch_model(result) == pytest.approx(result.accuracy, abs=1e-9)
    assert result.values.shape == (result.program.n_live,)
    with pytest.raises(fs.ConfigError, match="expected uint8 images"):
        result.inputs(np.zeros((1, 1, 3, 3), np.uint8))


def test_the_torch_model_has_its_batch_norm_statistics(tmp_path: Path) -> None:
    own = ["method=fedavg", "model.name=tests.test_api:batch_norm_model", "rounds=1"]
    result = fs.run(fs.load(None, [*TINY, *own]), tmp_path / "run")
    assert accuracy_of_the_torch_model(result) == pytest.approx(result.accuracy, abs=1e-9)


def test_the_mask_is_that_of_the_end(result: fs.Result, tmp_path: Path) -> None:
    """A method may change it while it trains: what counts is the program beside the values."""
    for name in ("config.toml", "env.json", "metrics.jsonl", "summary.json"):
        (tmp_path / name).write_bytes((result.folder / name).read_bytes())
    model = result.model()
    mask = random_mask(model, 0.2)
    program, values = compile(model, mask, input_shape=result.program.input_shape)
    program.save(tmp_path / "model.fsp", values)
    restore(model, program, values)
    found = fs.read(tmp_path).model().state_dict()
    assert all(torch.equal(found[name], expected) for name, expected in model.state_dict().items())


def test_without_a_folder_a_run_is_kept_and_none_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = fs.load(None, [*TINY, "rounds=1", "name=mine"])
    folders = [fs.run(config).folder for _ in range(3)]
    assert folders == [Path("runs/mine"), Path("runs/mine-2"), Path("runs/mine-3")]
    assert fs.run(config, resume=True).folder == folders[0]


def test_a_stopped_run_goes_on_to_the_same_values(result: fs.Result, tmp_path: Path) -> None:
    config = fs.load(None, TINY)
    with pytest.raises(KeyboardInterrupt):
        fs.run(config, tmp_path / "run", watch=stop_after(1))
    again = fs.run(config, tmp_path / "run", resume=True)
    assert again.values.tobytes() == result.values.tobytes()
    assert again.config == config


def test_a_run_goes_back_and_on_with_other_settings(tmp_path: Path) -> None:
    config = fs.load(None, TINY)
    before = fs.run(config, tmp_path / "run")
    again = fs.run(config, tmp_path / "run", resume=True, at=2, changes={"train.lr": 0.001})
    assert list(again["lr"][:2]) == list(before["lr"][:2])
    assert all(again["lr"][2:] < 0.0011)
    assert again.config.train.lr == 0.001
    assert again.summary.changes is not None


def test_compare_gives_every_arm_with_every_seed(tmp_path: Path) -> None:
    base = fs.load(None, [*TINY, "rounds=1"])
    configs = [base, base.with_({"method": "baffle"})]
    found = fs.compare(configs, seeds=[0, 1], folder=tmp_path / "both")
    assert {arm: [result.summary.seed for result in results] for arm, results in found.items()} == {
        "ntk-baffle": [0, 1],
        "baffle": [0, 1],
    }
    assert found.accuracies()["baffle"].shape == (2,)
    table = found.to_pandas()
    assert table.columns[:3].tolist() == ["arm", "seed", "round"]
    assert len(table) == 4
    again = fs.compare(configs, seeds=[0, 1], folder=tmp_path / "both", resume=True)
    assert again["baffle"][1].values.tobytes() == found["baffle"][1].values.tobytes()
    with pytest.raises(fs.ConfigError, match="share a name"):
        fs.compare([base, base])
    with pytest.raises(fs.ConfigError, match="compare with nothing"):
        fs.compare([base])


def test_to_pandas(result: fs.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    table = result.to_pandas()
    assert table["round"].tolist() == [1, 2, 3, 4]
    assert table["accuracy"].notna().tolist() == [False, True, False, True]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fs.ForeseedError, match="pip install pandas"):
        result.to_pandas()


def test_the_package_alone_imports_nothing_heavy() -> None:
    script = """
import sys
import foreseed
heavy = {"numpy", "torch", "pydantic", "foreseed.api", "foreseed.engine"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
sys.modules["pydantic"] = None
try:
    foreseed.load
except ImportError as error:
    print(error)
assert not hasattr(foreseed, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "foreseed.load is of the server side, and pydantic is not installed here" in done.stdout
    assert "foreseed[server]" in done.stdout

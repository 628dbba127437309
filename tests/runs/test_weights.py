"""Runs that start from weights: those of another run, for instance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import foreseed as fs
from foreseed.methods.task import Task
from foreseed.models import stats
from foreseed.runs import Progress, RunError
from foreseed.simulate import prepare, run_simulated
from foreseed.trained import Trained, evaluate
from tests.runs.small import stop_after, tiny

DENSE = ["method=baffle", "model.name=tests.test_api:batch_norm_model"]
PLAIN = ["model.name=tests.runs.test_weights:plain_model", "rounds=1", "eval_every=1"]


def plain_model(classes: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 64, classes))


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Pictures and processes to measure take longer than the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreseed.simulate.experiment.picture", lambda *_: None)
        patch.setattr("foreseed.meter.device.process_peak_bytes", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[fs.Result, Path]:
    """A run by backpropagation, and its weights as a file."""
    folder = tmp_path_factory.mktemp("first")
    result = fs.run(tiny(*DENSE, "method=fedavg", "train.lr=0.1"), folder / "run")
    return result, result.export("torch", folder / "weights.pt")[0]


def task_of(*overrides: str) -> Task:
    return prepare(tiny(*overrides))[0]


def test_a_dense_run_starts_where_the_other_ended(tmp_path: Path) -> None:
    learnt = fs.run(tiny(*PLAIN, "method=fedavg", "train.lr=0.1"), tmp_path / "first")
    weights = learnt.export("torch", tmp_path / "weights.pt")[0]
    assert learnt.accuracy > 0.3
    on = fs.run(tiny(*PLAIN, "method=baffle", f"model.weights={weights}", "train.lr=1e-9"), tmp_path / "second")
    assert on.accuracy == learnt.accuracy
    np.testing.assert_allclose(on.values, learnt.values, rtol=1e-5)


def test_statistics_of_batch_norms_are_taken_too(first: tuple[fs.Result, Path]) -> None:
    result, weights = first
    task = task_of(*DENSE, f"model.weights={weights}")
    assert task.values.tobytes() == result.values.tobytes()
    assert task.stats.tobytes() == stats(result.model(), result.program).tobytes()
    assert task.stats.tobytes() != task_of(*DENSE).stats.tobytes()
    start = Trained("start", task.config, task.program, task.values, task.stats, task.classes)
    assert evaluate(start).accuracy == result.accuracy


def test_pruning_scores_the_weights_that_were_given(first: tuple[fs.Result, Path]) -> None:
    pruned = ["method=ntk-baffle", DENSE[1], f"model.weights={first[1]}", "prune.density=0.4"]
    magnitude = task_of(*pruned, "prune.pruner=magnitude")
    dense = torch.load(first[1], weights_only=True)
    assert magnitude.pruning is not None
    sizes = torch.cat([dense[name].abs()[live] for name, live in magnitude.pruning.mask.items()])
    dead = torch.cat([dense[name].abs()[~live] for name, live in magnitude.pruning.mask.items()])
    assert sizes.min() >= dead.max()
    for name, live in magnitude.pruning.mask.items():
        kept = magnitude.model.get_parameter(name)
        assert torch.equal(kept, dense[name] * live), "given weights are kept as they are, not rescaled"
    ntk = ["prune.pruner=ntk-rand", "prune.iterations=2", "prune.redraws=1"]
    own, drawn = task_of(*pruned, *ntk), task_of(*pruned, *ntk, "model.weights=")
    assert own.digests()["mask"] != drawn.digests()["mask"]
    assert own.digests()["mask"] == task_of(*pruned, *ntk, "prune.redraw_weights=false").digests()["mask"]


def test_the_user_is_told_what_is_scored(first: tuple[fs.Result, Path], tmp_path: Path) -> None:
    seen: list[Progress] = []
    config = tiny(DENSE[1], f"model.weights={first[1]}", "prune.pruner=magnitude", "rounds=1", "prune.density=0.5")
    run_simulated(config, tmp_path / "run", watch=seen.append)
    assert [progress.note for progress in seen if "pruned as they are" in progress.note] == [seen[0].note]


def test_a_run_is_resumed_with_the_weights_that_it_began_with(first: tuple[fs.Result, Path], tmp_path: Path) -> None:
    weights, folder = tmp_path / "weights.pt", tmp_path / "run"
    state = torch.load(first[1], weights_only=True)
    torch.save(state, weights)
    config = tiny(*DENSE, f"model.weights={weights}")
    with pytest.raises(KeyboardInterrupt):
        run_simulated(config, folder, watch=stop_after(2))
    state["5.bias"][0] += 1e-6
    torch.save(state, weights)
    with pytest.raises(RunError, match=r"its model\.weights and initial values differ"):
        run_simulated(config, folder, resume=True)
    state = torch.load(first[1], weights_only=True)
    torch.save(state, weights)
    run_simulated(config, folder, resume=True)
    run_simulated(config, tmp_path / "whole")
    assert (folder / "model.fsp").read_bytes() == (tmp_path / "whole" / "model.fsp").read_bytes()


def test_a_task_without_weights_has_no_digest_of_them() -> None:
    assert "model.weights" not in task_of(*DENSE).digests()

"""Runs that start from weights: those of another run, for instance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import foreseed as fs
from foreseed.config import load
from foreseed.methods.task import Task
from foreseed.models import stats
from foreseed.runs import Progress, RunError
from foreseed.simulate import prepare, run_simulated
from tests.runs.small import stop_after, tiny

DENSE = ["method=baffle", "model.name=tests.test_api:batch_norm_model"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[fs.Result, Path]:
    """A run by backpropagation, and its weights as a file."""
    folder = tmp_path_factory.mktemp("first")
    result = fs.run(tiny(*DENSE, "method=fedavg", "train.lr=0.1"), folder / "run")
    return result, result.export("torch", folder / "weights.pt")[0]


def task_of(*overrides: str) -> Task:
    return prepare(tiny(*overrides))[0]


def test_a_dense_run_starts_where_the_other_ended(first: tuple[fs.Result, Path], tmp_path: Path) -> None:
    result, weights = first
    config = tiny(*DENSE, f"model.weights={weights}", "rounds=1", "eval_every=1", "train.lr=1e-9")
    task, _ = prepare(config)
    assert task.values.tobytes() == result.values.tobytes()
    assert np.array(stats(result.model(), result.program)).tobytes() == task.stats.astype(np.float64).tobytes()
    assert np.ptp(task.stats) > 1.1  # trained ones: means of 0 and variances of 1 at first
    frozen = fs.run(config.with_({"method": "fedavg"}), tmp_path / "run")
    assert frozen.accuracy == result.accuracy
    assert result.accuracy > 0.15


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
    again = task_of(*pruned, *ntk, "prune.redraw_weights=true", "prune.rescale=true")
    assert own.digests()["mask"] != drawn.digests()["mask"] == again.digests()["mask"]


def test_what_is_not_said_of_pruning_follows_from_weights() -> None:
    given = load(None, ["model.weights=a.pt"])
    assert (given.prune.redraw_weights, given.prune.rescale) == (False, False)
    assert load().with_({"model.weights": "a.pt"}).prune == given.prune
    paper = load(None, ["preset=paper", "model.weights=a.pt"])
    assert (paper.prune.redraw_weights, paper.prune.rescale, paper.prune.batch) == (False, False, 256)
    asked = load(None, ["model.weights=a.pt", "prune.redraw_weights=true", "prune.rescale=true"])
    assert (asked.prune.redraw_weights, asked.prune.rescale) == (True, True)
    assert load().prune.redraw_weights


def test_the_user_is_told_what_is_scored(first: tuple[fs.Result, Path], tmp_path: Path) -> None:
    seen: list[Progress] = []
    config = tiny(DENSE[1], f"model.weights={first[1]}", "prune.pruner=magnitude", "rounds=1", "prune.density=0.5")
    run_simulated(config, tmp_path / "run", watch=seen.append)
    assert [progress.note for progress in seen if "scores the weights of" in progress.note] == [seen[0].note]


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

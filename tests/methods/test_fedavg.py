"""FedAvg: the average, and a round against one written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed import models
from foreseed.config import Config
from foreseed.coordinator import Coordinator, Optimiser, Rules
from foreseed.coordinator.sampling import sample
from foreseed.engine import ForeseedError, ValuesError
from foreseed.meter import Work
from foreseed.methods import Job, LocalResult, RoundResult, fedavg
from foreseed.methods.backprop import LocalTrainer
from foreseed.runs import checkpoint
from tests.methods.small import digits, lenet, pruned, with_batch_norm

SIZES = [7, 12, 5, 16, 9]
TRAIN: dict[str, Any] = {"epochs": 1, "batch": 4, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}


# --- the average ---


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(-10, 10, width=32)), min_size=1, max_size=20))
def test_average_weighs_devices_by_their_samples(devices: list[tuple[int, float]]) -> None:
    n, w = np.array(devices).T
    mean = fedavg.aggregate((int(n), np.array([w, -w], np.float32)) for n, w in devices)
    assert mean.dtype == np.float32
    expected = (n * w).sum() / n.sum()
    np.testing.assert_allclose(mean, [expected, -expected], rtol=1e-6, atol=1e-12)


def test_average_of_equal_values_is_these_values_to_the_bit() -> None:
    values = np.random.default_rng(0).normal(size=500).astype(np.float32)
    np.testing.assert_array_equal(fedavg.aggregate([(3, values), (77, values), (1001, values)]), values)


def test_average_is_rounded_once() -> None:
    # Summed in float32, the small ones would be lost beside the large one.
    small = [(1, np.float32([2.0**-24]))] * 4
    assert fedavg.aggregate([(4, np.float32([1])), *small])[0] == np.float32((4 + 2.0**-22) / 8)


def test_average_leaves_what_it_is_given_alone() -> None:
    values = np.ones(3, np.float32)
    fedavg.aggregate([(1, values), (3, 2 * values)])
    np.testing.assert_array_equal(values, np.ones(3, np.float32))


def test_average_of_nothing_or_of_different_programs_is_refused() -> None:
    ones = np.ones(3, np.float32)
    with pytest.raises(ForeseedError, match="no device has trained"):
        fedavg.aggregate([])
    with pytest.raises(ValuesError, match="values of one program"):
        fedavg.aggregate([(1, ones), (1, ones[1:])])
    with pytest.raises(ValuesError, match="0 samples with 3 values"):
        fedavg.aggregate([(0, ones)])


# --- a round ---


class Devices:
    """Threads with a trainer each, as the simulator has them."""

    def __init__(self, task: Any, workers: int) -> None:
        self.pool, self._task = ThreadPoolExecutor(workers), task
        self._trainer = LocalTrainer(task.model, task.program)

    def train(self, job: Job) -> Iterator[LocalResult]:
        def one(device: int) -> LocalResult:
            trained = self._trainer.copy().train(
                job.values, *digits(SIZES[device], seed=device), **TRAIN | {"lr": job.lr}, seed=(11, job.round, device),
                stats=job.stats,
            )  # fmt: skip
            return LocalResult(SIZES[device], trained.values, trained.stats, trained.loss)

        yield from self.pool.map(one, job.devices)


def task(make: Any = lenet, density: float = 0.3, ema: float = 0.0) -> Any:
    model = make()
    program, values = pruned(model, density)
    stats = np.array(models.stats(model, program), np.float32)
    keys = {f"train.{key}": value for key, value in TRAIN.items()} | {"train.lr_decay": 0.5, "train.ema": ema}
    config = Config().with_({"seed": 11, "data.devices": 5, "data.per_round": 3, **keys})
    return SimpleNamespace(config=config, model=model, program=program, values=values, stats=stats)


def rounds(of: Any, count: int, workers: int = 1, state: Any = None) -> tuple[fedavg.State, list[RoundResult]]:
    devices: Any = Devices(of, workers)
    state = state or fedavg.init(of)
    results = [fedavg.round(of, devices, state) for _ in range(count)]
    devices.pool.shutdown()
    return state, results


@pytest.mark.parametrize("make", [lenet, with_batch_norm])
def test_two_rounds_are_algorithm_1(make: Any) -> None:
    here = task(make)
    state, rows = rounds(here, 2)
    trainer, values, stats = LocalTrainer(here.model, here.program), here.values, here.stats
    for t in (1, 2):
        devices = sample(11, t, range(5), 3)
        results = [
            trainer.train(
                values, *digits(SIZES[k], seed=k), **TRAIN | {"lr": 0.02 * 0.5 ** (t - 1)}, seed=(11, t, k), stats=stats
            )
            for k in devices
        ]
        share = np.array([SIZES[k] for k in devices]) / sum(SIZES[k] for k in devices)
        assert rows[t - 1].train_loss == pytest.approx(share @ [result.loss for result in results])
        values = sum(s * result.values.astype(np.float64) for s, result in zip(share, results, strict=True))
        stats = sum(s * result.stats.astype(np.float64) for s, result in zip(share, results, strict=True))
        values, stats = values.astype(np.float32), stats.astype(np.float32)
    np.testing.assert_allclose(state.values, values, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state.stats, stats, rtol=1e-5, atol=1e-7)
    assert (state.values != here.values).mean() > 0.9


def test_any_number_of_workers_gives_the_same_bits() -> None:
    (one, rows), (three, same_rows) = rounds(task(), 2, workers=1), rounds(task(), 2, workers=3)
    np.testing.assert_array_equal(one.values, three.values)
    assert rows == same_rows


def test_restored_state_goes_on_as_if_never_saved(tmp_path: Path) -> None:
    here = task(ema=0.9)
    through, rows = rounds(here, 2)
    checkpoint.save(tmp_path / "state.npz", 1, rounds(here, 1)[0])
    again = fedavg.init(here)
    assert checkpoint.restore(tmp_path / "state.npz", again) == 1
    _, [last] = rounds(here, 1, state=again)
    assert last == rows[1]
    np.testing.assert_array_equal(again.values, through.values)
    np.testing.assert_array_equal(again.ema, through.ema)


def test_moving_average_follows_the_values() -> None:
    here = task(ema=0.75)
    state, _ = rounds(here, 1)
    np.testing.assert_allclose(state.ema, 0.75 * here.values + 0.25 * state.values, rtol=1e-6, atol=1e-7)
    assert rounds(task(), 1)[0].ema is None


def test_costs_of_a_round() -> None:
    here = task(with_batch_norm, density=1)
    _, [row] = rounds(here, 1)
    samples = sum(SIZES[device] for device in sample(11, 1, range(5), 3))
    moved = 3 * 4 * (here.program.n_live + here.program.n_stats)
    assert (row.round, row.lr, len(row.participants), row.samples) == (1, 0.02, 3, samples)
    assert row.work == Work(3 * samples, 6 * samples * here.program.macs, 6 * samples * here.program.dense_macs)
    assert row.traffic[:2] == (moved, moved)


def test_devices_are_those_that_a_bp_free_run_would_ask() -> None:
    rules = Rules(b"run", seed=2**40 + 11, devices=30, per_round=4, k=2, sigma=1e-4)
    coordinator = Coordinator.start(rules, Optimiser(), np.zeros(3))
    asked = [order.device for order in coordinator.open()]
    assert sample(2**40 + 11, 1, range(30), 4) == asked
    assert sample(2**40 + 11, 2, range(30), 4) != asked
    assert sample(0, 1, range(3), 10) == [0, 1, 2]

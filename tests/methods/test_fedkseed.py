"""FedKSeed: a model that is sums along a pool of directions, whatever a device has missed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foreseed.config import ConfigError
from foreseed.engine import SHARED_DEVICE, Directions
from foreseed.engine.native import direction
from foreseed.fleet.devices import check
from foreseed.methods import fedkseed
from foreseed.simulate import run_simulated
from tests.simulate.small import WITH_BATCH_NORM, World, leave_out_the_slow, make_world, small_config, write_bars

KEYS = {
    "method": "fedkseed", "fedkseed.pool": 32, "train__local_steps": 12, "train__batch": 4, "train__lr": 1e-3,
    "train__difference": "central", "train__sigma": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(small_config(bars, **KEYS))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)


def pool(world: World) -> np.ndarray:
    """All directions of the pool, by the generator that devices have."""
    drawn = Directions(world.config.seed, 0, SHARED_DEVICE, 32)
    return np.stack([np.asarray(direction(drawn, j, len(world.task.values))) for j in range(32)]).astype(np.float64)


def test_the_model_is_the_initial_one_and_the_sums_alone(world: World) -> None:
    state = fedkseed.init(world.task)
    with world.devices() as devices:
        for _ in range(3):
            fedkseed.round(world.task, devices, state)
    assert (state.sums != 0).sum() > 20
    expected = world.task.values - state.sums.astype(np.float64) @ pool(world)
    np.testing.assert_allclose(state.values, expected, atol=1e-5)
    assert np.abs(state.values - world.task.values).max() > 1e-3


class Bowl:
    """A device whose loss is half the squared distance from 0, so a slope along z is z w."""

    device, samples = 3, 10

    def __init__(self, directions: np.ndarray) -> None:
        self.directions, self.seen, self.batches = directions, [], []

    def slopes(self, values: np.ndarray, rows: np.ndarray, d: Directions, central: bool) -> tuple[np.ndarray, float]:
        assert (d.round, d.device, d.count, central) == (0, SHARED_DEVICE, 1, True)
        self.seen.append(d.first)
        self.batches.append(rows)
        return np.array([self.directions[d.first] @ values]), 1.0


def test_a_device_descends_along_one_direction_after_the_other(world: World) -> None:
    state, bowl = fedkseed.init(world.task), Bowl(pool(world))
    found = fedkseed.client_update(world.task, state, bowl, 1e-3)
    values = world.task.values.astype(np.float64)
    for j, slope in zip(found.drawn, found.slopes, strict=True):
        assert slope == pytest.approx(bowl.directions[j] @ values, rel=1e-3, abs=1e-4)
        values -= 1e-3 * slope * bowl.directions[j]
    assert bowl.seen == found.drawn.tolist()
    # Three minibatches are an epoch of ten images.
    assert [len(rows) for rows in bowl.batches] == [4, 4, 2] * 4
    assert sorted(np.concatenate(bowl.batches[:3])) == list(range(10))
    assert (found.samples, found.images, found.loss) == (10, 40, 1.0)


def test_sums_are_weighted_by_samples_and_a_direction_may_come_up_twice() -> None:
    one = fedkseed.Sums(30, np.array([0, 2, 0]), np.array([1.0, 4.0, 3.0]), 0.0, 0)
    two = fedkseed.Sums(10, np.array([2]), np.array([8.0]), 0.0, 0)
    sums = fedkseed.added(np.array([1, 1, 1], np.float32), [one, two], 0.5)
    np.testing.assert_allclose(sums, [1 + 0.5 * 0.75 * 4, 1, 1 + 0.5 * (0.75 * 4 + 0.25 * 8)])


def test_bytes_are_the_pool_s_whatever_was_missed(world: World) -> None:
    state, task = fedkseed.init(world.task), world.task
    met: set[int] = set()
    with world.devices() as devices:
        for _ in range(5):
            result = fedkseed.round(task, devices, state)
            new = set(result.participants) - met
            met |= new
            fetched = len(new) * (len(task.program.bytes) + 4 * task.program.n_live)
            assert result.traffic.bytes_down == 3 * 4 * 32 + fetched
            # 12 draws: at most that many pairs of 8 bytes, and 8 for the loss and the samples.
            assert 3 * (8 + 8) < result.traffic.bytes_up <= 3 * (8 * 12 + 8)
            sizes = world.population.partition.sizes[result.participants]
            assert result.work.forward_passes <= 2 * 3 * 12 * 4
            assert result.samples == sizes.sum()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"train__weight_decay": 0.1}, "train.weight_decay 0.1: fedkseed's model is sums of directions; set it to 0"),
        ({"model__name": WITH_BATCH_NORM}, "fedkseed's devices send no statistics of a BatchNorm"),
    ],
)
def test_what_it_cannot_do_is_refused_before_the_first_round(
    changes: dict[str, object], complaint: str, bars: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run_simulated(small_config(bars, **KEYS, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_real_fleet_refuses_it_in_a_line(bars: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(small_config(bars, **KEYS))
    expected = "method fedkseed is a simulation: no order names the directions of a pool; expected ntk-baffle or baffle"
    assert str(refusal.value) == expected


def test_bars_are_learnt_by_sums(bars: Path, tmp_path: Path) -> None:
    changes = KEYS | {
        "fedkseed.pool": 400,
        "train__local_steps": 60,
        "train__lr": 2e-3,
        "rounds": 15,
        "engine": "exact",
    }
    summary = run_simulated(small_config(bars, **changes), tmp_path / "run")
    assert summary.final_accuracy > 0.6
    assert summary.memory.note.endswith("the initial values and the pool's sums")

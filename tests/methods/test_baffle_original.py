"""BAFFLE as its authors ran it: minibatches, a clip by the largest coordinate, Adam, an average by epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreseed.config import ConfigError, load
from foreseed.engine import Directions
from foreseed.engine.native import direction
from foreseed.fleet.devices import check
from foreseed.methods import baffle_original
from foreseed.simulate import run_simulated
from tests.simulate.small import WITH_BATCH_NORM, World, leave_out_the_slow, make_world, small_config, write_bars

KEYS = {
    "method": "baffle-original", "data__partition": "iid", "data__per_round": 6, "train__optimiser": "adam",
    "train__lr_decay": 1.0, "train__weight_decay": 5e-4, "train__ema": 0.995, "train__batch": 8,
}  # fmt: skip
EPOCH = {"baffle-original.level": "epoch"}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(small_config(bars, **KEYS))  # 20 images each: minibatches of 8, 8 and 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)


class Slope:
    """A device whose loss falls by its number, and a half, along the first coordinate alone."""

    samples = 20

    def __init__(self, device: int) -> None:
        self.device, self.rows, self.directions = device, [], []

    def slopes(self, values: np.ndarray, rows: np.ndarray, d: Directions, central: bool) -> tuple[np.ndarray, float]:
        self.rows.append(rows)
        self.directions.append(d)
        z = np.stack([np.asarray(direction(d, k, len(values))) for k in d.numbers()])
        return (self.device + 0.5) * z[:, 0].astype(np.float64), 2.0


class Slopes:
    """Devices of such slopes, and of different sizes."""

    def __init__(self, devices: int) -> None:
        self.probers = [Slope(device) for device in range(devices)]

    def sizes(self) -> np.ndarray:
        return np.array([prober.samples for prober in self.probers])

    def probe(self, _: Any, devices: Any, work: Any) -> Any:
        return (work(self.probers[device]) for device in devices)


def gradient_of(config: Any, device: int, round: int, i: int, n: int, clip: float = 0.3) -> np.ndarray:
    """The estimate of such a device as the authors' code makes it."""
    d = Directions(config.seed, round, device, config.train.k, i * config.train.k)
    z = np.stack([np.asarray(direction(d, k, n)) for k in d.numbers()]).astype(np.float64)
    g = torch.from_numpy(((device + 0.5) * z[:, :1] * z).mean(axis=0))
    parameter = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    parameter.grad = g
    torch.nn.utils.clip_grad_norm_([parameter], max_norm=clip, norm_type="inf")
    return g.numpy()


def adam(values: np.ndarray, lr: float) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """Torch's own, with the authors' settings."""
    w = torch.from_numpy(values.astype(np.float64)).requires_grad_(True)
    return w, torch.optim.Adam([w], lr=lr, betas=(0.9, 0.99), weight_decay=5e-4)


def test_batch_level_is_the_authors_fedsgd(world: World) -> None:
    """FengHZ/BAFFLE, main.py `fedsgd` and model/stein_identity.py `_stein_estimation`, with torch's Adam and clip."""
    task, config = world.task, world.config
    state, devices = baffle_original.init(task), Slopes(6)
    w, optimiser = adam(task.values, 0.01)
    for number in range(1, 6):
        result = baffle_original.round(task, devices, state)
        parts = [gradient_of(config, device, number, 0, len(task.values)) for device in range(6)]
        assert [np.abs(part).max() <= 0.3 + 1e-9 for part in parts] == [True] * 6
        w.grad = torch.from_numpy(sum(parts) / 6)
        optimiser.step()
        np.testing.assert_allclose(state.values, w.detach().numpy(), atol=2e-5)
    rows = [prober.rows for prober in devices.probers]
    assert [len(some) for some in rows[0]] == [8, 8, 4, 8, 8]
    assert sorted(np.concatenate(rows[0][:3])) == list(range(20))  # an epoch has every image once
    assert rows[0][0].tolist() != rows[0][3].tolist()
    assert rows[0][0].tolist() != rows[1][0].tolist()
    n = 4 * len(task.values)
    assert result.traffic[:2] == (6 * 4 * (config.train.k + 1), 6 * n)
    assert (result.samples, result.work.forward_passes) == (48, 48 * (config.train.k + 1))


def test_epoch_level_is_the_authors_fedavg(world: World) -> None:
    """The same file's `fedavg` and `avg_util`: an Adam of each device's own, which it keeps from epoch to epoch."""
    task, config = world.task, world.config.with_(EPOCH)
    task = World(task, world.population).changed(**EPOCH).task
    state, devices = baffle_original.init(task), Slopes(6)
    own = [adam(task.values, 0.01) for _ in range(6)]
    for number in (1, 2):
        result = baffle_original.round(task, devices, state)
        for device, (w, optimiser) in enumerate(own):
            for i in range(3):
                w.grad = torch.from_numpy(gradient_of(config, device, number, i, len(task.values)))
                optimiser.step()
        mean = sum(w.detach() for w, _ in own) / 6
        for w, _ in own:
            w.data.copy_(mean)
        np.testing.assert_allclose(state.values, mean.numpy(), atol=2e-5)
    n = 4 * len(task.values)
    assert result.traffic[:2] == (6 * (n + 4), 6 * n)
    assert (result.samples, result.work.forward_passes) == (120, 120 * (config.train.k + 1))
    memory = baffle_original.device_memory(task, state)
    assert memory.planned_bytes == baffle_original.device_memory(world.task, state).planned_bytes + 4 * n


def test_the_average_goes_on_once_an_epoch_and_warms_up(world: World) -> None:
    """torch_ema's decay is min(0.995, (1 + t) / (10 + t)), t counting from 1."""
    state, devices = baffle_original.init(world.task), Slopes(6)
    average = world.task.values.astype(np.float64)
    for number in range(1, 8):
        baffle_original.round(world.task, devices, state)
        if number % 3 == 0:
            t = number // 3
            average = (1 + t) / (10 + t) * average + 9 / (10 + t) * state.values
        np.testing.assert_allclose(state.ema, average, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data__per_round": 3}, "baffle-original asks all devices in every round: data.per_round 3 of data.devices 6"),
        ({"model__name": WITH_BATCH_NORM}, "baffle-original's devices send no statistics of a BatchNorm"),
    ],
)
def test_what_its_authors_have_not_is_refused_before_the_first_round(
    changes: dict[str, object], complaint: str, bars: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run_simulated(small_config(bars, **KEYS | changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_real_fleet_refuses_it_in_a_line(bars: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(small_config(bars, **KEYS))
    reason = "no order asks for a minibatch, or for steps of Adam"
    assert str(refusal.value) == f"method baffle-original is a simulation: {reason}; expected ntk-baffle or baffle"


@pytest.mark.parametrize("changes", [{}, EPOCH])
def test_real_differences_come_to_their_limit(bars: Path, changes: dict[str, str], tmp_path: Path) -> None:
    keys = KEYS | {"rounds": 2, "train__k": 20, "train__sigma": 1e-3, "train__difference": "central"} | changes
    losses = []
    for engine in ("difference", "exact"):
        world = make_world(small_config(bars, engine=engine, **keys))
        state = baffle_original.init(world.task)
        with world.devices() as devices:
            results = [baffle_original.round(world.task, devices, state) for _ in range(2)]
        losses.append((state.values, [result.train_loss for result in results]))
    (values, found), (limit, exact) = losses
    assert np.corrcoef(values - world.task.values, limit - world.task.values)[0, 1] > 0.99
    np.testing.assert_allclose(found, exact, rtol=2e-3)


@pytest.mark.parametrize(("changes", "rounds"), [({}, 40), (EPOCH, 15)])
def test_bars_are_learnt(bars: Path, tmp_path: Path, changes: dict[str, str], rounds: int) -> None:
    keys = KEYS | {"rounds": rounds, "train__k": 60, "train__lr": 0.02} | changes
    summary = run_simulated(small_config(bars, **keys), tmp_path / "run")
    assert summary.final_accuracy > 0.8


def test_the_published_settings_are_those_of_the_authors() -> None:
    config = load("baffle-original")
    t = config.train
    assert (t.k, t.sigma, t.batch, t.lr, t.weight_decay, t.ema) == (100, 1e-4, 32, 0.01, 5e-4, 0.995)
    assert (t.optimiser, config.own(baffle_original.Settings).clip, config.data.devices) == ("adam", 0.3, 10)

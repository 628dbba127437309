"""FedSGD: one step along the exact gradient of the devices that were asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foreseed.coordinator.sampling import sample
from foreseed.methods import fedsgd
from foreseed.methods.backprop import LocalTrainer
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, small_config, write_bars


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


def rounds(world: World, count: int) -> tuple[fedsgd.State, list[fedsgd.RoundResult]]:
    state = fedsgd.init(world.task)
    with world.devices() as devices:
        return state, [fedsgd.round(world.task, devices, state) for _ in range(count)]


def test_a_round_is_a_step_along_the_mean_gradient(bars: Path) -> None:
    world = make_world(small_config(bars, method="ntk-fedsgd", train__lr=0.1, train__momentum=0.0))
    state, [row] = rounds(world, 1)
    chosen = sample(world.config.seed, 1, range(6), 3)
    trainer, found = LocalTrainer(world.task.model, world.task.program), []
    for device in chosen:
        images, labels = world.population.images(device)
        found.append((len(images), *trainer.gradient(world.task.values, images, labels, [(0, len(images))])))
    total = sum(count for count, _, _ in found)
    gradient = sum(count / total * gradients[0].astype(np.float64) for count, gradients, _ in found)
    np.testing.assert_allclose(state.values, world.task.values - 0.1 * gradient, rtol=1e-5, atol=1e-7)
    assert row.train_loss == pytest.approx(sum(count / total * loss for count, _, loss in found))
    assert (row.round, list(row.participants), row.samples, row.snr) == (1, chosen, total, None)
    assert row.traffic.bytes_up == 3 * 4 * world.task.program.n_live


def test_it_learns_and_the_clip_bounds_a_step(bars: Path) -> None:
    world = make_world(small_config(bars, method="fedsgd", train__lr=0.1))
    _, rows = rounds(world, 12)
    assert rows[-1].train_loss < 0.8 * rows[0].train_loss
    tight = world.changed(train__clip=1e-3, train__momentum=0.0)
    short, _ = rounds(tight, 1)
    assert np.linalg.norm(short.values - world.task.values) == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_batch_norms_statistics_are_the_devices_means(bars: Path) -> None:
    world = make_world(small_config(bars, method="fedsgd", model__name=WITH_BATCH_NORM))
    state, _ = rounds(world, 1)
    assert state.stats.shape == world.task.stats.shape
    assert np.isfinite(state.stats).all()
    assert (state.stats != world.task.stats).all()

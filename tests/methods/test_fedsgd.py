"""FedSGD: one step along the exact gradient of the devices that were asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreseed.coordinator import Optimiser
from foreseed.coordinator.sampling import sample
from foreseed.methods import fedsgd
from foreseed.methods.backprop import LocalTrainer
from foreseed.methods.descent import restarted, step
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


def test_nesterov_steps_along_the_gradient_and_the_momentum_after_it(bars: Path) -> None:
    world = make_world(small_config(bars, method="ntk-fedsgd", train__lr=0.1, train__momentum=0.5, train__memory=True))
    plain, _ = rounds(world, 1)
    ahead, _ = rounds(world.changed(train__nesterov=True), 1)
    np.testing.assert_array_equal(ahead.buffers[0], plain.buffers[0])
    moved = plain.values - world.task.values  # 0.1 g, and with half of the momentum, which is g, half as much again
    np.testing.assert_allclose(ahead.values - world.task.values, 1.5 * moved, rtol=1e-4, atol=1e-7)


def test_nesterov_by_hand() -> None:
    momentum, gradient = np.array([1, -2], np.float32), np.array([3, 1], np.float32)
    constants = Optimiser("sgd", lr=2.0, momentum=0.5).step(1)
    values, [after] = step(np.zeros(2, np.float32), [momentum], gradient, constants, nesterov=True)
    assert after.tolist() == [3.5, 0.0]
    assert values.tolist() == [-2 * (3 + 0.5 * 3.5), -2 * 1.0]


def test_momentum_starts_anew_where_the_gradient_points_against_it() -> None:
    optimiser, momentum = Optimiser("sgd", lr=2.0, momentum=0.5, restarts=True), np.array([1, -2], np.float32)
    along, against = np.array([3, 1], np.float32), np.array([1, 1], np.float32)
    assert not restarted(optimiser, along, [momentum])
    assert restarted(optimiser, against, [momentum])
    assert not restarted(replace(optimiser, restarts=False), against, [momentum])
    # Nothing but the round's momentum changes, so devices that replay updates need not know of it.
    values, [after] = step(np.zeros(2, np.float32), [momentum], against, optimiser.step(1, restart=True))
    assert (after.tolist(), values.tolist()) == ([1.0, 1.0], [-2.0, -2.0])


def test_a_round_against_the_momentum_forgets_it(bars: Path) -> None:
    world = make_world(small_config(bars, method="ntk-fedsgd", train__restarts=True)).changed(train__weight_decay=0.0)
    state, _ = rounds(world, 1)
    gradient = state.buffers[0].copy()
    state, again = fedsgd.init(world.task), fedsgd.init(world.task)
    state.buffers, again.buffers = [-gradient], [gradient]
    with world.devices() as devices:
        fedsgd.round(world.task, devices, state)
        fedsgd.round(world.task, devices, again)
    np.testing.assert_array_equal(state.buffers[0], gradient)
    np.testing.assert_allclose(again.buffers[0], 1.9 * gradient, rtol=1e-5)


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

"""NTK-BAFFLE against the paper's Algorithm 1, written again in plain lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.draws import Draws
from foreseed.engine import Directions, Engine, direction
from foreseed.methods import ntk_baffle
from tests.simulate.small import World, make_world, small_config, write_bars

K, SIGMA, LR, MOMENTUM, ROUNDS, PER_ROUND = 6, 1e-4, 0.01, 0.9, 3, 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    bars: Path = write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")
    return make_world(small_config(bars, train__k=K, train__sigma=SIGMA, train__momentum=MOMENTUM, train__lr_decay=1.0))


def algorithm_1(world: World) -> Any:
    """The second half of Algorithm 1, line by line."""
    engine, seed = Engine(world.task.program), world.config.seed
    w = world.task.values.copy()  # 1: W <- W0 * m
    velocity = np.zeros_like(w)
    for t in range(1, ROUNDS + 1):  # 2
        chosen = Draws(seed, "sample", t).choose(range(world.config.data.devices), PER_ROUND)  # 3-4
        images = sum(world.population.samples(i).count for i in chosen)
        gradient = np.zeros_like(w)
        for i in chosen:  # 5
            data = world.population.samples(i)
            base = engine.loss(w, data)[0] / data.count
            for k in range(K):  # 6-9: device i measures dL along its own directions
                z = np.array(direction(Directions(seed, t, i, K), k, len(w)), np.float32)
                moved = engine.loss(w + np.float32(SIGMA) * z, data)[0] / data.count
                difference = np.float64(np.float32(moved - base))
                # 10-11: Eq. 16, with N_i / N over the devices that were asked
                gradient += np.float32(data.count / images * (1 / (K * SIGMA)) * difference) * z
        velocity = np.float32(MOMENTUM) * velocity + gradient
        w -= np.float32(LR) * velocity  # 12
    return w


def test_values_are_those_of_algorithm_1_written_plainly(world: World) -> None:
    state = ntk_baffle.init(world.task)
    with world.devices() as devices:
        for _ in range(ROUNDS):
            ntk_baffle.round(world.task, devices, state)
    np.testing.assert_array_equal(state.values, algorithm_1(world))
    assert (state.values != world.task.values).mean() > 0.9


def test_rates_by_layer_are_shares_of_the_step_for_each_tensor(world: World) -> None:
    """One round: the step of `rate = "layers"` is that of `"fixed"`, each tensor times its share."""
    moved = {}
    for rate in ("fixed", "layers"):
        changed = world.changed(train__rate=rate, train__memory=True, train__momentum=0.0, train__clip=0.0)
        state = ntk_baffle.init(changed.task)
        with changed.devices() as devices:
            ntk_baffle.round(changed.task, devices, state)
        moved[rate] = state.values - world.task.values
        shares = state.descent.noise.shares
    assert len(set(shares)) > 2
    np.testing.assert_allclose(moved["layers"], shares * moved["fixed"], rtol=1e-3, atol=1e-6)


def test_a_round_against_the_momentum_forgets_it_where_devices_replay_too(world: World) -> None:
    changed = world.changed(train__restarts=True)
    first, state = ntk_baffle.init(changed.task), ntk_baffle.init(changed.task)
    with changed.devices() as devices:
        ntk_baffle.round(changed.task, devices, first)
        state.server.buffers = [-first.server.buffers[0]]
        ntk_baffle.round(changed.task, devices, state)
    np.testing.assert_array_equal(state.server.buffers[0], first.server.buffers[0])
    assert np.frombuffer(state.coordinator.log[-1].step, "<f4").tolist()[1] == 0.0

"""DeComFL is BAFFLE with shared seeds: numbers both ways, as many for a model of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from foreseed.config import load
from foreseed.engine import SHARED_DEVICE, Directions
from foreseed.engine.native import direction
from foreseed.fleet.devices import check
from foreseed.methods import ntk_baffle
from tests.simulate.small import TINY, World, make_world, small_config, write_bars

KEYS = {
    "method": "baffle", "rounds": 12, "train__seeds": "shared", "train__difference": "central", "train__sigma": 1e-3,
    "train__momentum": 0.9, "train__k": 4, "fleet__replay_numbers": 10**9,
}  # fmt: skip


def larger(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=3), nn.Hardswish(), nn.Flatten(), nn.Linear(16 * 4 * 4, 60), nn.Hardswish(),
        nn.Linear(60, classes),
    )  # fmt: skip


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


def traffic(world: World) -> list[tuple[bool, int, int]]:
    """Of each round: whether a device was asked for the first time, and bytes up and down."""
    state, met, found = ntk_baffle.init(world.task), set[int](), []
    with world.devices() as devices:
        for _ in range(world.config.rounds):
            result = ntk_baffle.round(world.task, devices, state)
            found.append((not set(result.participants) <= met, *result.traffic[:2]))
            met |= set(result.participants)
    return found


def test_bytes_do_not_grow_with_the_model(bars: Path) -> None:
    small, large = (
        make_world(small_config(bars, **KEYS, model__name=name)) for name in (TINY, "tests.methods.test_decomfl:larger")
    )
    assert large.task.program.n_live > 20 * small.task.program.n_live
    here, there = traffic(small), traffic(large)
    settled = [i for i, (new, _, _) in enumerate(here) if not new]
    assert len(settled) > 5
    assert [here[i][2] for i in settled] == [there[i][2] for i in settled]
    assert [here[i][1] for i in settled] == [there[i][1] for i in settled]
    # An order, and an update of 4 numbers for each round that was missed; the values would be 66 kB.
    assert max(here[i][2] for i in settled) < 3 * 1000 < 4 * large.task.program.n_live


def test_local_steps_come_to_the_sum_of_the_mean_steps(bars: Path) -> None:
    """DeComFL's update: step by step, the devices' mean slope along each shared direction, times the rate."""
    changes: dict[str, Any] = {"train__momentum": 0.0, "train__local_steps": 3, "train__local_lr": 0.01}
    world = make_world(small_config(bars, **KEYS | changes))
    coordinator, replies = world.ask()
    state = ntk_baffle.init(world.task)
    with world.devices() as devices:
        ntk_baffle.round(world.task, devices, state)
    counts = np.array([reply.samples for reply in replies])
    differences = np.stack([np.frombuffer(reply.losses, "<f4")[1:] for reply in replies])
    slopes = (counts / counts.sum()) @ differences / 1e-3
    d = Directions(world.config.seed, 1, SHARED_DEVICE, 12)
    z = np.stack([np.asarray(direction(d, k, len(state.values))) for k in range(12)])
    expected = world.task.values.astype(np.float64)
    for step in range(3):
        some = slice(4 * step, 4 * step + 4)
        expected -= 0.01 * slopes[some] @ z[some] / 4
    np.testing.assert_allclose(state.values, expected, atol=1e-6)
    assert coordinator.rules.scalars == 12


def test_the_shipped_experiment_is_one_of_numbers_alone() -> None:
    config = load("decomfl")
    check(config)  # a real fleet runs it
    assert (config.method, config.train.seeds, config.train.difference) == ("baffle", "shared", "central")
    assert config.train.sigma == 1e-3

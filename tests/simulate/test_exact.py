"""The exact engine is the limit of the difference engine as sigma goes to 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulate.small import TINY, WITH_BATCH_NORM, World, make_world, small_config


@pytest.fixture(scope="module")
def worlds(bars: Path) -> dict[str, World]:
    return {name: make_world(small_config(bars, model__name=name)) for name in (TINY, WITH_BATCH_NORM)}


def slopes(world: World, engine: str, sigma: float, **train: Any) -> np.ndarray:
    """Loss differences over sigma of every device that is asked."""
    keys = {f"train.{key}": value for key, value in train.items()}
    there = world.changed(**{"engine": engine, "train.sigma": sigma, "train.k": 20} | keys)
    return np.array([np.frombuffer(reply.losses, "<f4")[1:] for reply in there.ask()[1]]) / sigma


def error(world: World, sigma: float, **train: Any) -> float:
    """How far the difference engine is from the exact one, in units of what both measure."""
    exact, difference = (slopes(world, engine, sigma, **train) for engine in ("exact", "difference"))
    assert exact.shape == difference.shape
    return float(np.sqrt(np.mean((exact - difference) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize("model", [TINY, WITH_BATCH_NORM])
@pytest.mark.parametrize("spread", [1, 3, 20])
def test_forward_differences_come_ten_times_nearer_as_sigma_shrinks_ten_times(
    worlds: dict[str, World], model: str, spread: int
) -> None:
    errors = [error(worlds[model], sigma, spread=spread) for sigma in (1e-2, 1e-3, 1e-4)]
    assert errors[0] < 0.2
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.3)
    assert errors[2] == pytest.approx(errors[1] / 10, rel=0.7)


@pytest.mark.parametrize("model", [TINY, WITH_BATCH_NORM])
@pytest.mark.parametrize("spread", [1, 3])
def test_blocks_of_layers_agree_as_well(worlds: dict[str, World], model: str, spread: int) -> None:
    errors = [error(worlds[model], sigma, k=40, spread=spread, blocks=8) for sigma in (1e-2, 1e-3)]
    assert errors[1] < errors[0] / 5
    changed = worlds[model].changed(train__k=40, train__spread=spread, train__blocks=8)
    assert len(changed.ask()[0].rules.blocks) > 1


@pytest.mark.parametrize("spread", [1, 3])
def test_central_differences_come_a_hundred_times_nearer(worlds: dict[str, World], spread: int) -> None:
    errors = [error(worlds[TINY], sigma, spread=spread, difference="central") for sigma in (1e-1, 1e-2, 1e-3)]
    assert errors[1] == pytest.approx(errors[0] / 100, rel=0.3)
    assert errors[2] < errors[1] / 20  # rounding begins to show


def test_rounding_of_float32_drowns_the_smallest_sigmas(worlds: dict[str, World]) -> None:
    assert error(worlds[TINY], 1e-6) > 5 * error(worlds[TINY], 1e-4)


@pytest.mark.parametrize("spread", [1, 3])
@pytest.mark.parametrize("difference", ["forward", "central"])
def test_local_steps_go_the_same_way_in_both_engines(worlds: dict[str, World], spread: int, difference: str) -> None:
    world, settings = worlds[TINY], {"spread": spread, "difference": difference, "local_lr": 0.1}
    several = slopes(world, "exact", 1e-3, local_steps=3, **settings)
    assert several.shape == (3, 60)
    np.testing.assert_array_equal(several[:, :20], slopes(world, "exact", 1e-3, **settings))
    # The steps really move: what was measured after them is not what would have been measured before.
    standing = slopes(world, "exact", 1e-3, local_steps=3, **settings | {"local_lr": 1e-9})
    assert np.abs(several - standing)[:, 40:].max() > 0.1 * np.abs(standing).mean()
    errors = [error(world, sigma, local_steps=3, **settings) for sigma in (1e-2, 1e-3)]
    assert errors[1] < errors[0] / 5


def test_rademacher_and_shared_directions_agree_as_well(worlds: dict[str, World]) -> None:
    for settings in ({"direction": "rademacher"}, {"seeds": "shared"}):
        errors = [error(worlds[TINY], sigma, **settings) for sigma in (1e-2, 1e-3)]
        assert errors[1] == pytest.approx(errors[0] / 10, rel=0.3)


def test_both_engines_report_the_same_base_loss_and_samples(worlds: dict[str, World]) -> None:
    for name, world in worlds.items():
        there, here = (world.changed(engine=engine).ask()[1] for engine in ("exact", "difference"))
        for exact, difference in zip(there, here, strict=True):
            assert exact.base_loss == pytest.approx(difference.base_loss, rel=1e-5), name
            assert exact.samples == difference.samples
            assert exact.stats == difference.stats

"""What a config makes of [prune], and what is asked of devices for it."""

from __future__ import annotations

import numpy as np
import pytest

from foreseed.config import ConfigError, load
from foreseed.data import load as load_data
from foreseed.methods import make_task
from foreseed.prune import PRUNERS
from foreseed.simulate import prepare
from foreseed.simulate.population import Population

SMALL = ["data.devices=4", "data.per_round=2", "prune.iterations=2", "prune.redraws=1", "prune.batch=5"]
ASKING = [name for name, pruner in PRUNERS.items() if pruner.asks != "nothing"]


@pytest.mark.parametrize("pruner", ASKING)
def test_a_pruner_that_makes_devices_backpropagate_is_refused_on_a_real_fleet(pruner: str) -> None:
    config = load(None, [*SMALL, f"prune.pruner={pruner}"])
    with pytest.raises(
        ConfigError, match=f"^prune.pruner {pruner} makes devices backpropagate, which real ones cannot"
    ):
        make_task(config, load_data("digits").held_out)


def test_devices_are_asked_for_a_batch_of_their_own_images_and_labels() -> None:
    config = load(None, SMALL)
    population = Population.of(config, load_data("digits"))
    asked = population.images_to_prune_by(config)
    assert len(asked) == 2
    every = [population.images(device) for device in range(4)]
    for images, labels in asked:
        assert len(images) == len(labels) == 5
        assert any(np.array_equal(images, mine[:5]) and np.array_equal(labels, classes[:5]) for mine, classes in every)
    assert len({images.tobytes() for images, _ in asked}) == 2


@pytest.mark.parametrize("pruner", ["snip", "grasp"])
def test_what_devices_did_to_prune_is_in_the_task(pruner: str) -> None:
    cost = prepare(load(None, [*SMALL, f"prune.pruner={pruner}"]))[0].pruning.cost
    assert len(cost.device_flops) == 2
    assert min(cost.device_flops) > 0
    assert cost.upload_bytes > 4 * 61_770 - 1


def test_weighing_by_cost_makes_a_cheaper_program_of_as_many_weights() -> None:
    plain = prepare(load(None, SMALL))[0].program
    cheap = prepare(load(None, [*SMALL, "prune.cost=flops", "prune.cost_power=0.3"]))[0].program
    unused = prepare(load(None, [*SMALL, "prune.cost_power=0.3"]))[0].program
    assert cheap.n_live == plain.n_live
    assert cheap.macs < 0.7 * plain.macs
    assert unused.bytes == plain.bytes

"""A run like another: which device held which images there, and what does not match is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.runs import Row, RunError
from foreseed.runs.records import to_json
from foreseed.simulate import Example, read_example
from foreseed.simulate import run_simulated as run
from tests.simulate.small import World, make_world, small_config


def row(round: int, sizes: Mapping[int, int]) -> Row:
    """A round in which these devices answered, with so many images each."""
    numbers = dict.fromkeys(("lr", "train_loss", "forward_passes", "flops", "dense_flops", "bytes_up", "bytes_down"), 1)
    tests = dict.fromkeys(("accuracy", "loss", "ema_accuracy", "ema_loss"))
    return Row(
        round=round, devices=len(sizes), samples=sum(sizes.values()), participants=tuple(sizes),
        sizes=tuple(sizes.values()), seconds=0.0, **numbers, **tests,
    )  # fmt: skip


def example(sizes: Mapping[int, int], names: Mapping[int, str] | None = None) -> Example:
    return Example(Path("there"), [row(1, sizes)], names or {})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.randoms(use_true_random=False), st.booleans())
def test_a_fleet_in_any_order_is_found_by_counts_or_by_names(sizes: list[int], random: Random, named: bool) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    there = {number: sizes[shard] for number, shard in enumerate(order)}
    names = {number: f"device-{shard}" for number, shard in enumerate(order)} if named else {}
    if named or len(set(sizes)) == len(sizes):
        assert example(there, names).holders(sizes) == order
        return
    if [there[number] for number in range(len(sizes))] == sizes:
        assert example(there).holders(sizes) == list(range(len(sizes)))
        return
    with pytest.raises(RunError, match="which of them it was is not known"):
        example(there).holders(sizes)


def test_devices_that_never_answered_have_what_is_left() -> None:
    assert example({1: 40, 3: 10}).holders([10, 20, 30, 40]) == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({0: 10, 1: 21}, r"device 1 \(attic\) had 21 images, no device has as many here"),
        ({0: 20, 1: 20}, "as many images as only one has here"),
        ({0: 30, 1: 10}, r"device 0 \(kitchen\) had 30 images, as devices 2 and 3 have here"),
        ({0: 10, 4: 10}, "it has a device 4, this experiment 4; set data.devices"),
    ],
)
def test_what_does_not_match_is_refused_by_name(sizes: dict[int, int], complaint: str) -> None:
    with pytest.raises(RunError, match=complaint):
        example(sizes, {0: "kitchen", 1: "attic"}).holders([10, 20, 30, 30])


def test_a_device_that_got_other_images_on_the_way_is_refused() -> None:
    there = Example(Path("there"), [row(1, {0: 10}), row(2, {0: 12})], {})
    with pytest.raises(RunError, match="device 0 had 10 images at first and 12 in round 2"):
        there.holders([10, 20])


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(small_config(bars))


def served(world: World, folder: Path, order: list[int]) -> Path:
    """What a server writes whose devices came in some order."""
    config, population = world.config, world.population.renumbered(order)
    run(config, folder, prepared=World(world.task, population))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.jsonl", "wb") as file:
        for each in rows:
            sizes = [int(population.partition.sizes[device]) for device in each["participants"]]
            file.write(to_json(Row(**each | {"sizes": sizes})) + b"\n")
    return folder


def test_renumbered_devices_hold_the_same_images(world: World) -> None:
    order = [3, 1, 4, 0, 5, 2]
    other = world.population.renumbered(order)
    for device, holder in enumerate(order):
        for mine, its in zip(other.images(device), world.population.images(holder), strict=True):
            np.testing.assert_array_equal(mine, its)


def test_a_run_whose_devices_came_in_another_order_is_gone_through_again_to_the_bit(
    world: World, tmp_path: Path
) -> None:
    assert len(set(world.population.partition.sizes.tolist())) == 6
    there = served(world, tmp_path / "there", [3, 1, 4, 0, 5, 2])
    run(world.config, tmp_path / "here", prepared=world, like=read_example(there, world.config))
    assert (tmp_path / "here" / "model.fsp").read_bytes() == (there / "model.fsp").read_bytes()


def test_other_images_of_the_same_count_are_noticed_and_nothing_is_left(world: World, tmp_path: Path) -> None:
    there = served(world, tmp_path / "there", list(range(6)))
    images = 255 - world.population.records
    images[:, 0] = world.population.records[:, 0]
    other = World(world.task, replace(world.population, records=images))
    with pytest.raises(RunError, match=r"round 1: devices have \d+ images and a loss of .* they held other images"):
        run(world.config, tmp_path / "here", prepared=other, like=read_example(there, world.config))
    assert not (tmp_path / "here").exists()


def test_a_run_of_another_config_or_of_changed_settings_is_no_example(world: World, tmp_path: Path) -> None:
    there = served(world, tmp_path / "there", list(range(6)))
    with pytest.raises(RunError, match=r"another config \(train.k\); set the same here"):
        read_example(there, world.config.with_({"train.k": 4}))
    with pytest.raises(RunError, match="that run has 5 rounds, this one 6; set rounds=5"):
        read_example(there, world.config.with_({"rounds": 6}))
    (there / "changes.jsonl").write_text('{"round": 2, "settings": {"train.lr": [0.1, 0.2]}}\n')
    with pytest.raises(RunError, match=r"train\.lr changed after round 2 there"):
        read_example(there, world.config)

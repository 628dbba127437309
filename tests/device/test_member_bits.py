"""A device in a run answers with the simulator's bits, whatever the experiment asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foreseed.device.member import Member
from foreseed.methods import ntk_baffle
from foreseed.methods.ntk_baffle import learn
from foreseed.methods.task import records
from foreseed.wire import (
    Fetch,
    Message,
    Reply,
)
from tests.device.scripted import (
    Server,
    ask,
    join,
    kinds,
    needed_bytes,
    without_costs,
)
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, small_config, write_bars

NORM = {"model__name": WITH_BATCH_NORM}


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    bars = write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")
    return {"plain": make_world(small_config(bars)), "norm": make_world(small_config(bars, **NORM))}


def members_of(world: World, folder: Path, **options: Any) -> list[Member]:
    members = []
    for device in range(world.config.data.devices):
        path = folder / f"{device}.bin"
        images, labels = world.population.images(device)
        path.write_bytes(records(images, labels).tobytes())
        members.append(Member(path, **options))
    return members


def assert_same_replies(world: World, folder: Path, rounds: int = 4, **options: Any) -> list[list[Message]]:
    """Hold rounds with members, and compare each reply with that of the simulated device; returns what was said."""
    coordinator = ntk_baffle.init(world.task).coordinator
    batch = world.config.train.batch if world.task.program.n_stats else 0
    server = Server(coordinator, world.task.program, batch)
    members, said = members_of(world, folder, **options), []
    for device, member in enumerate(members):
        join(server, member, device)
    with world.devices() as simulation:
        for _ in range(rounds):
            orders = coordinator.open()
            for order, simulated in zip(
                orders, simulation.replies(orders, world.task.program, coordinator.state.values), strict=True
            ):
                said.append(ask(server, members[order.device], order))
                assert without_costs(said[-1][-1]) == simulated
            learn(coordinator)
    assert coordinator.state.round == rounds
    return said


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train__direction": "rademacher"},
        {"train__seeds": "shared"},
        {"train__spread": 3},
        {"train__difference": "central"},
        {"train__local_steps": 3, "train__local_lr": 0.05},
        {"train__optimiser": "adam"},
        {"train__momentum": 0.0},
        {"train__bits": 1},
        {"train__bits": 2, "train__seeds": "shared", "train__spread": 3},
        {"train__bits": 8, "train__difference": "central"},
        {"train__direction": "rademacher", "train__seeds": "shared", "train__spread": 2, "train__difference": "central",
         "train__local_steps": 2},
    ],
    ids=lambda settings: " ".join(key.removeprefix("train__") for key in settings) or "default",
)  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "norm"])
def test_replies_are_the_simulators_to_the_bit(
    worlds: dict[str, World], name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_replies(worlds[name].changed(**settings), tmp_path)


def test_batch_norm_statistics_are_those_of_the_servers_batches(worlds: dict[str, World], tmp_path: Path) -> None:
    # More images than a batch, and fewer: a batch that is never filled may as well be smaller.
    sizes = worlds["norm"].population.partition.sizes
    assert min(sizes) < 25 < max(sizes)
    assert_same_replies(worlds["norm"].changed(train__batch=25, data__per_round=6), tmp_path, rounds=2)


def test_devices_without_a_vector_fetch_the_state_every_time(worlds: dict[str, World], tmp_path: Path) -> None:
    # So many scalars a round that the values are cheaper.
    said = assert_same_replies(worlds["plain"].changed(train__k=200), tmp_path)
    assert all(kinds(messages) == [Fetch, Reply] for messages in said)


def test_engine_of_the_smallest_budget_gives_the_same_bits(worlds: dict[str, World], tmp_path: Path) -> None:
    world = worlds["plain"]
    server = Server(ntk_baffle.init(world.task).coordinator, world.task.program)
    budget = 2 * len(world.task.program.bytes)
    needed = needed_bytes(server, members_of(world, tmp_path, memory_budget=budget)[0], budget)
    assert_same_replies(world, tmp_path, memory_budget=needed)

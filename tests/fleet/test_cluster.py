"""A fleet on a real NATS cluster, and a run with two servers: whoever is lost, it ends as the simulator does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from foreseed.config import Config
from foreseed.data import load, write_shards
from foreseed.fleet.local_nats import NatsCluster
from foreseed.runs.folder import rows_so_far
from tests.fleet.kills import RealFleet, fleet_config, simulated, takeover
from tests.simulate.small import World, make_world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


@pytest.fixture(scope="module")
def config(bars: Path) -> Config:
    return fleet_config(bars)


@pytest.fixture(scope="module")
def world(config: Config) -> World:
    return make_world(config)


@pytest.fixture(scope="module")
def shards(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(load(world.config.data.set), world.population.partition, folder / "shards")
    return folder / "shards"


@pytest.fixture(scope="module")
def expected(config: Config, world: World, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return simulated(config, tmp_path_factory.mktemp("simulated") / "run", world)


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster.plain() as running:
        yield running


def test_a_run_whose_nodes_are_killed_and_restarted_ends_as_simulated(
    config: Config, shards: Path, expected: bytes, cluster: NatsCluster, tmp_path: Path
) -> None:
    random = Random(2)
    with RealFleet(config, tmp_path / "fleet", shards, cluster=cluster) as fleet:
        for number, after in enumerate(sorted(random.sample(range(config.rounds - 1), 2))):
            fleet.wait_for(after)
            fleet.kill("node", number, random.uniform(0, 0.3))
            cluster.wait()
        fleet.finish()
        assert fleet.devices.wait() == [0] * config.data.devices
    assert (tmp_path / "fleet" / "run" / "model.fsp").read_bytes() == expected
    rows = rows_so_far(tmp_path / "fleet" / "run")
    assert [row.round for row in rows] == list(range(1, config.rounds + 1))
    # Every answer counts once: those of the simulator's sample, no more and no fewer.
    assert all(len(set(row.participants)) == len(row.participants) == config.data.per_round for row in rows)


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_server_that_stands_by_takes_over_and_one_that_wakes_up_changes_nothing(
    config: Config, shards: Path, expected: bytes, tmp_path: Path, how: str
) -> None:
    assert takeover(config, tmp_path / "fleet", shards, Random(1), how) == expected
    rows = rows_so_far(tmp_path / "fleet" / "run")
    assert [row.round for row in rows] == list(range(1, config.rounds + 1))

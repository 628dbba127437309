"""Simulations on Ray: the same bits as on threads, whatever is lost on the way."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.engine import ForeseedError
from foreseed.methods import fedavg, fedsgd, ntk_baffle
from foreseed.runs import read_run
from foreseed.simulate import SimulatedDevices, on_ray
from foreseed.simulate.on_ray import RayHands
from foreseed.sweep import run_configs
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, small_config, write_bars

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each; tests must be found by their workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", RAY_AUTH_MODE="disabled")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000})
        made.add_node(num_cpus=1, object_store_memory=80_000_000)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def values_after(world: World, method: Any, rounds: int, elsewhere: Any = None, between: Any = None) -> np.ndarray:
    devices, state = SimulatedDevices(*world, elsewhere=elsewhere), method.init(world.task)
    try:
        for number in range(rounds):
            method.round(world.task, devices, state)
            if between is not None:
                between(number)
    finally:
        devices.close()
    return state.values


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (ntk_baffle, {"train__k": 8, "train__spread": 2}),
        (ntk_baffle, {"model__name": WITH_BATCH_NORM, "engine": "exact"}),
        (fedavg, {"method": "fedavg"}),
        (fedsgd, {"method": "fedsgd", "model__name": WITH_BATCH_NORM}),
    ],
)
def test_the_bits_are_those_of_threads(cluster: Any, bars: Path, method: Any, changes: dict[str, Any]) -> None:
    world = make_world(small_config(bars, **changes))
    there = values_after(world, method, 3, RayHands("ray", *world))
    assert there.tobytes() == values_after(world, method, 3).tobytes()


def test_a_lost_worker_costs_a_repeat_and_nothing_else(cluster: Any, bars: Path) -> None:
    world = make_world(small_config(bars, train__k=8))
    hands = RayHands("ray", *world)

    def kill(number: int) -> None:
        if number == 0:
            process = hands._ray.get(hands._hands[0].process.remote())
            os.kill(process, signal.SIGKILL)

    assert values_after(world, ntk_baffle, 3, hands, kill).tobytes() == values_after(world, ntk_baffle, 3).tobytes()


def test_whole_runs_come_back_as_folders(cluster: Any, bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, method="fedavg", rounds=2, eval_every=1)
    wanted = [(config.with_({"seed": seed}), tmp_path / str(seed)) for seed in (0, 1)]
    there = run_configs(wanted, on="ray")
    here = run_configs([(config, tmp_path / f"here-{config.seed}") for config, _ in wanted[:1]])
    assert not any(isinstance(result, str) for result in there)
    first = read_run(tmp_path / "0")
    assert (tmp_path / "0" / "model.fsp").read_bytes() == (tmp_path / "here-0" / "model.fsp").read_bytes()
    assert not isinstance(here[0], str)
    assert first.summary.total.flops == here[0].total.flops


def test_a_lost_node_costs_a_repeat_and_nothing_else(cluster: Any, bars: Path) -> None:
    world = make_world(small_config(bars, train__k=8))
    hands = RayHands("ray", *world)
    lost = cluster.worker_nodes.copy().pop()

    def remove(number: int) -> None:
        if number == 0:
            cluster.remove_node(lost, allow_graceful=False)

    assert values_after(world, ntk_baffle, 3, hands, remove).tobytes() == values_after(world, ntk_baffle, 3).tobytes()


def test_what_cannot_be_is_said_in_a_line(cluster: Any, bars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForeseedError, match="expected ray, or ray://HOST:PORT"):
        on_ray.connect("dask")
    world = make_world(small_config(bars))
    monkeypatch.setattr(on_ray, "find_spec", lambda _: None)
    with pytest.raises(ForeseedError, match=r"pip install 'foreseed\[ray\]'"):
        on_ray.connect("ray")
    monkeypatch.undo()
    monkeypatch.setattr(on_ray, "versions", lambda: ("9.9", "3.99"))
    with pytest.raises(ForeseedError, match=r"this is foreseed 9\.9 on Python 3\.99; install the same on every node"):
        RayHands("ray", *world)
    monkeypatch.undo()
    big = np.broadcast_to(np.zeros(1, np.uint8), (10**9, 1))
    monkeypatch.setattr(type(world.population), "records", big, raising=False)
    with pytest.raises(ForeseedError, match="larger --object-store-memory"):
        on_ray._check_room(on_ray.connect("ray"), type("Big", (), {"records": big})())


def test_shares_are_even_and_complete() -> None:
    shares = on_ray._balanced([5, 1, 1, 1, 2, 4], 2)
    assert sorted(i for share in shares for i in share) == list(range(6))
    loads = [sum([5, 1, 1, 1, 2, 4][i] for i in share) for share in shares]
    assert loads == [7, 7]

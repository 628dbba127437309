"""Simulations on Ray: the same bits as on threads, whatever is lost on the way."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.cli import main
from foreseed.config import methods
from foreseed.engine import ForeseedError
from foreseed.runs import Progress
from foreseed.simulate import SimulatedDevices, on_ray, run_simulated
from foreseed.simulate.devices import Elsewhere, Work
from foreseed.simulate.on_ray import Hand, RayHands, balanced, pack
from foreseed.sweep import run_configs
from foreseed.sweep.on_ray import pack as pack_folder
from foreseed.sweep.on_ray import run_whole, unpack
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, outcome, small_config


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """For Ray, which reads it when it is loaded: a token and a folder of its own; its workers find the tests."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    # Sockets lie in the folder, and their paths must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": folder, "PYTHONPATH": path,
        }.items():  # fmt: skip
            patch.setenv(name, value)
        yield


def values_after(world: World, rounds: int, elsewhere: Elsewhere | None = None) -> bytes:
    method, devices = methods()[world.config.method], SimulatedDevices(*world, elsewhere=elsewhere)
    try:
        state = method.init(world.task)
        for _ in range(rounds):
            method.round(world.task, devices, state)
    finally:
        devices.close()
    return bytes(state.values.tobytes() + state.stats.tobytes())


# What travels, without Ray.


class Packed:
    """Two hands in this process: all that they get, and give, has been packed."""

    def __init__(self, world: World) -> None:
        self.world, self.largest = world, 0
        self.hands = [Hand(*pickle.loads(pickle.dumps(tuple(world)))) for _ in range(2)]

    def share_out(self, work: Work[Any, Any], items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        packed = pack(self.world.task, work, items)
        self.largest = max(self.largest, len(packed))
        found: dict[int, Any] = {}
        for hand, share in zip(self.hands, balanced(sizes, 2), strict=True):
            found |= zip(share, pickle.loads(pickle.dumps(hand.do(packed, share))), strict=True)
        return [found[i] for i in range(len(items))]

    def close(self) -> None:
        for hand in self.hands:
            hand._devices.close()


CHANGES: dict[str, list[dict[str, Any]]] = {
    "ntk-baffle": [{"train__spread": 2}, {"model__name": WITH_BATCH_NORM, "engine": "exact"}],
    "baffle-original": [{"data__per_round": 6}, {"data__per_round": 6, "engine": "exact"}],
    "fedkseed": [{"fedkseed__pool": 16, "train__local_steps": 2}],
    "fedsgd": [{"model__name": WITH_BATCH_NORM}],
    "fedtiny": [{"fedtiny__every": 1, "fedtiny__until": 3, "model__name": WITH_BATCH_NORM}],
    "feddst": [{"feddst__every": 1}],
    "prunefl": [{"prunefl__every": 2, "prunefl__initial_rounds": 4, "prunefl__times": "macs"}],
}


@pytest.mark.parametrize(
    ("method", "changes"),
    [(method, changes) for method in methods() for changes in CHANGES.get(method, [{}])],
)
def test_every_methods_work_travels(bars: Path, method: str, changes: dict[str, Any]) -> None:
    world = make_world(small_config(bars, method=method, **changes))
    packed = Packed(world)
    assert values_after(world, 3, packed) == values_after(world, 3)
    # A task, with its test images, stays at home.
    assert 0 < packed.largest < world.task.test.nbytes


def test_shares_are_even_and_complete() -> None:
    sizes = [5, 1, 1, 1, 2, 4]
    shares = balanced(sizes, 2)
    assert sorted(i for share in shares for i in share) == list(range(6))
    assert [sum(sizes[i] for i in share) for share in shares] == [7, 7]


# On Ray itself.


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        import ray
        from ray.cluster_utils import Cluster

        room = {"num_cpus": 1, "object_store_memory": 80_000_000}
        made = Cluster(initialize_head=True, head_node_args=room)
        try:
            made.add_node(**room)
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Kept:
    """Actors that several runs share."""

    def __init__(self, hands: RayHands) -> None:
        self.hands = hands

    def share_out(self, work: Work[Any, Any], items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        return self.hands.share_out(work, items, sizes)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(small_config(bars, train__k=8, workers=2))


@pytest.fixture(scope="module")
def hands(cluster: Any, world: World) -> Iterator[Kept]:
    hands = RayHands("ray", *world)
    yield Kept(hands)
    hands.close()


@pytest.mark.slow
def test_the_bits_are_those_of_threads(hands: Kept, world: World) -> None:
    assert values_after(world, 3, hands) == values_after(world, 3)


@pytest.mark.slow
def test_a_mistake_is_said_as_it_is_here(hands: Kept) -> None:
    def refuse(there: SimulatedDevices, some: Sequence[int]) -> list[int]:
        raise ForeseedError("too much; lower it")

    with pytest.raises(ForeseedError, match=r"^too much; lower it$"):
        hands.share_out(refuse, [0, 1], [1, 1])


class Struck:
    """Actors that something befalls when they have worked, and before they can answer."""

    def __init__(self, hands: Elsewhere, blow: Callable[[], None]) -> None:
        self.hands, self.blow = hands, blow

    def share_out(self, work: Work[Any, Any], items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        blow = self.blow

        def interrupted(there: SimulatedDevices, some: list[Any]) -> list[Any]:
            done = list(work(there, some))
            blow()
            return done

        return self.hands.share_out(interrupted, items, sizes)

    def close(self) -> None: ...


@pytest.mark.slow
def test_a_lost_worker_costs_a_repeat_and_nothing_else(hands: Kept, world: World, tmp_path: Path) -> None:
    struck = tmp_path / "struck"

    def blow() -> None:
        try:
            struck.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    assert values_after(world, 2, Struck(hands, blow)) == values_after(world, 2)
    assert struck.exists()


@pytest.mark.slow
def test_whole_runs_come_back_as_folders(cluster: Any, bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, rounds=2, eval_every=1)
    run_simulated(config, tmp_path / "here")
    wanted = [(config, tmp_path / "there"), (config.with_({"method": "fedavg", "train.lr": 1e9}), tmp_path / "bad")]
    there, bad = run_configs(wanted, on="ray")
    assert not isinstance(there, str)
    for part in ("rows", "state", "model"):
        assert outcome(tmp_path / "there")[part] == outcome(tmp_path / "here")[part]
    assert "lower the learning rate" in str(bad)
    assert not (tmp_path / "bad").exists()
    # Finished ones are not run again, and nothing is written over.
    assert run_configs(wanted[:1], on="ray") == [there]
    [taken] = run_configs(wanted[:1], on="ray", resume=False)
    assert "exists and is not empty" in str(taken)


def test_a_run_that_was_stopped_goes_on_elsewhere(bars: Path, tmp_path: Path) -> None:
    config, stopped, there = small_config(bars), tmp_path / "stopped", tmp_path / "there"

    def stop(progress: Progress) -> None:
        if progress.row is not None and progress.row.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_simulated(config, stopped, watch=stop)
    packed = run_whole(config, pack_folder(stopped), on_ray.versions())
    assert isinstance(packed, bytes)
    unpack(packed, there)
    run_simulated(config, tmp_path / "whole")
    assert outcome(there) == outcome(tmp_path / "whole")
    # The rounds before it was stopped were not run again.
    first, again = ((at / "metrics.jsonl").read_text().splitlines()[:2] for at in (stopped, there))
    assert first == again


@pytest.mark.slow
def test_a_run_on_ray_is_the_run_on_threads(cluster: Any, bars: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(small_config(bars, rounds=3).to_toml())
    assert main(["run", str(file), "--out", str(tmp_path / "here"), "-q"]) == 0
    assert main(["run", str(file), "--out", str(tmp_path / "there"), "-q", "--on", "ray"]) == 0
    assert outcome(tmp_path / "there") == outcome(tmp_path / "here")


@pytest.mark.slow
def test_ray_is_measured_beside_threads(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ray", "--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["workers"] for row in result["overhead"]] == [1, 2]
    for row in result["overhead"]:
        assert row["overhead_ms"] == row["ray_ms"] - row["threads_ms"]
        assert min(row["ray_ms"], row["threads_ms"]) > 0
    assert min(result["gain"].values()) > 0
    assert result["devices"] == 10


@pytest.mark.slow
def test_a_node_of_other_versions_is_refused(cluster: Any, bars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(bars)
    world = make_world(config)
    monkeypatch.setattr(on_ray, "versions", lambda: ("9.9", "3.99"))
    with pytest.raises(ForeseedError, match=r"this is foreseed 9\.9 on Python 3\.99; install the same on every node"):
        RayHands("ray", *world)
    assert "this is foreseed 8.8 on Python 3.99; install" in str(run_whole(config, None, ("8.8", "3.99")))


@pytest.mark.slow
def test_a_store_that_is_too_small_is_refused(cluster: Any, world: World) -> None:
    records = np.broadcast_to(np.zeros(1, np.uint8), (10**9, 1))
    with pytest.raises(
        ForeseedError, match=r"images take 1000 MB, the object store of .* larger --object-store-memory"
    ):
        RayHands("ray", world.task, replace(world.population, records=records))


def test_what_cannot_be_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("dask", "ray://", "ray:", "ray:/host:6379"):
        with pytest.raises(ForeseedError, match="expected ray, or ray://HOST:PORT"):
            on_ray.connect(wrong)
    monkeypatch.setattr(on_ray, "find_spec", lambda _: None)
    with pytest.raises(ForeseedError, match=r"pip install 'foreseed\[ray\]'"):
        on_ray.connect("ray")


def nodes_of(hands: RayHands) -> set[str]:
    """Where the actors are."""

    def here(there: SimulatedDevices, some: list[Any]) -> list[str]:
        import ray

        return [ray.get_runtime_context().get_node_id() for _ in some]

    return set(hands.share_out(here, [0, 1], [1, 1]))


def hands_on(node_id: str, world: World) -> RayHands:
    """New actors, of which one is on a node: Ray spreads them out as well as it can, which is not a promise."""
    for _ in range(20):
        hands = RayHands("ray", *world)
        if node_id in nodes_of(hands):
            return hands
        hands.close()
    raise AssertionError("no actor was ever started on that node")


@pytest.mark.slow
def test_a_lost_node_costs_a_repeat_and_nothing_else(cluster: Any, world: World, tmp_path: Path) -> None:
    """The last of these tests, for the node does not come back."""
    [node] = cluster.worker_nodes
    node_id, struck, over = node.node_id, tmp_path / "struck", threading.Event()
    hands = hands_on(node_id, world)

    def blow() -> None:
        import ray

        if ray.get_runtime_context().get_node_id() == node_id:
            struck.touch()
            signal.pause()  # until the node is lost

    def remove() -> None:
        while not struck.exists():
            if over.wait(0.02):
                return
        cluster.remove_node(node, allow_graceful=False)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        values = values_after(world, 2, Struck(hands, blow))
    finally:
        over.set()
        remover.join()
        hands.close()
    assert struck.exists()
    assert values == values_after(world, 2)

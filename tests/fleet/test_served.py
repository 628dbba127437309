"""A run on a real fleet, with real processes and a real mosquitto: it ends as the simulator does, whoever is killed."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import cbor2
import numpy as np
import pytest

from foreseed.config import Config, ConfigError
from foreseed.data import load, write_shards
from foreseed.fleet.devices import FleetDevices, check
from foreseed.fleet.experiment import run_served
from foreseed.methods import ntk_baffle
from foreseed.report import write_report
from foreseed.runs import Lease, LeaseError, Progress, RunError, Summary
from foreseed.simulate import read_example, run_simulated
from foreseed.transport import topics
from foreseed.transport.link import Link, broker
from foreseed.wire import ANY_NUMBER, Announce, Fetch, Join, Message, OrderMessage, Ready, decode, encode
from tests.fleet.broker import Mosquitto
from tests.fleet.kills import Devices, KilledAtTheEnd, RealFleet, fleet_config, simulated, trial
from tests.simulate.small import World, leave_out_the_slow, make_world

PATIENCE = 300.0
"""Seconds after which a test gives up waiting; what it waits for takes moments."""


pytestmark = pytest.mark.usefixtures("quick")


def shards_of(world: World, folder: Path) -> Path:
    write_shards(load(world.config.data.set), world.population.partition, folder / "shards")
    return folder / "shards"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def participants(folder: Path) -> list[tuple[int, ...]]:
    return [tuple(row["participants"]) for row in rows_of(folder)]


@pytest.fixture(scope="module")
def config(bars: Path) -> Config:
    return fleet_config(bars, rounds=40)


@pytest.fixture(scope="module")
def world(config: Config) -> World:
    return make_world(config)


@pytest.fixture(scope="module")
def shards(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards_of(world, tmp_path_factory.mktemp("kills"))


# Seeds whose kills fall well before the last round, and on all three kinds.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [13, 36, 69])
def test_a_run_with_kills_ends_bit_equal_to_the_simulator(
    seed: int, config: Config, world: World, shards: Path, tmp_path: Path
) -> None:
    model, killed = trial(config, tmp_path / "real", shards, Random(seed), kills=4)
    assert len(killed) == 4
    assert set(killed) == {"server", "broker", "device"}
    assert model == simulated(config, tmp_path / "simulated", world)


@pytest.mark.slow
def test_a_server_killed_after_its_last_round_still_tells_devices_that_the_run_is_finished(
    bars: Path, shards: Path, tmp_path: Path
) -> None:
    # All devices in every round: each is in the run when it ends.
    config = fleet_config(bars, rounds=3, data__per_round=6)
    with RealFleet(config, tmp_path / "real", shards, KilledAtTheEnd) as fleet:
        fleet.server.join(PATIENCE)
        assert fleet.server.exitcode == -9
        assert fleet.rounds == 3
        assert not (tmp_path / "real" / "run" / "summary.json").exists()
        fleet.start_server()
        fleet.finish()
        assert fleet.devices.wait() == [0] * config.data.devices
        logs = [fleet.devices.log(number) for number in range(config.data.devices)]
    assert [log.splitlines()[-1] for log in logs] == ["the run is finished"] * config.data.devices
    summary = json.loads((tmp_path / "real" / "run" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["fleet"]["device_peak_mb"] > 10  # what was measured before the kill is not lost


@pytest.mark.slow
@pytest.mark.parametrize("best", [False, True])
def test_a_run_that_began_in_the_simulator_goes_on_with_real_devices(
    config: Config, world: World, shards: Path, tmp_path: Path, best: bool
) -> None:
    if best:
        world = world.changed(
            train__bits=1, train__memory=True, train__rate="noise", train__direction="rademacher", train__blocks=4,
        )  # fmt: skip
        assert len(ntk_baffle.init(world.task).coordinator.rules.blocks) == 2
    config = world.config

    def stop(progress: Progress) -> None:
        if progress.done == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_simulated(config, tmp_path / "run", prepared=world, watch=stop)
    with Mosquitto.plain() as mosquitto, Devices(mosquitto.url, config.data.devices, tmp_path, shards):
        summary = serve(config, tmp_path / "run", world, mosquitto.url, resume=True)
    assert (tmp_path / "run" / "model.fsp").read_bytes() == simulated(config, tmp_path / "simulated", world)
    assert summary.fleet.wire_up_bytes == sum(row["wire_up"] for row in rows_of(tmp_path / "run")[30:])


def test_devices_of_another_version_are_told_ever_more_rarely(
    config: Config, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    devices = FleetDevices(world.task, tmp_path, broker("mqtt://localhost"), said.append, Lease(tmp_path))
    monkeypatch.setattr(devices._loop, "connect", lambda *_, **__: None)
    devices._start(ntk_baffle.init(world.task).coordinator)
    old = cbor2.dumps([1, *cbor2.loads(encode(Join(ANY_NUMBER)))[1:]])
    for _ in range(3):
        for number in range(10):
            assert devices.receive(topics.up(f"device-{number}", "01234567"), old) == []
    devices.close()
    assert said == [
        f"device device-{count - 1} cannot be understood: message version 1, this foreseed speaks 4; install the same "
        f"foreseed here and there ({count} such devices so far)"
        for count in (1, 2, 4, 8)
    ]


def test_a_server_that_hears_of_its_successor_stops_and_of_its_predecessor_speaks_up(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    lease = Lease(tmp_path)
    lease.number = 5
    devices = FleetDevices(world.task, tmp_path, broker("mqtt://localhost"), said.append, lease)
    monkeypatch.setattr(devices._loop, "connect", lambda *_, **__: None)
    devices._start(ntk_baffle.init(world.task).coordinator)
    ((_, mine, _),) = devices.connected()

    def announced(number: int, lineage: bytes = lease.lineage) -> list[Any]:
        epoch = lineage + number.to_bytes(2, "big") + b"\0\1"
        return devices.receive(topics.ALL, encode(Announce(devices._run, epoch, False)))

    assert devices.receive(topics.ALL, mine) == announced(6, b"else") == []
    assert announced(4) == [(topics.ALL, mine, True)]
    assert not lease.is_lost
    assert announced(6) == []
    with pytest.raises(LeaseError, match="another server has taken this run over"):
        devices.costs([])
    devices.close()


@pytest.mark.slow
def test_a_server_needs_no_training_image_and_reports_what_devices_said(
    config: Config, world: World, shards: Path, tmp_path: Path
) -> None:
    with np.load(config.data.set) as arrays:
        np.savez(tmp_path / "tests.npz", test_images=arrays["test_images"], test_labels=arrays["test_labels"])
    alone = config.with_({"data.set": str(tmp_path / "tests.npz"), "rounds": 4})
    with Mosquitto.plain() as mosquitto, Devices(mosquitto.url, config.data.devices, tmp_path / "devices", shards):
        summary = run_served(alone, tmp_path / "run", broker(mosquitto.url), lambda line: None)
    assert summary.partition.stated
    assert set(summary.partition.sizes) <= set(world.population.partition.sizes)
    assert not list((tmp_path / "run" / "figures").glob("partition*"))
    page = write_report([tmp_path / "run"], tmp_path / "report").read_text()
    assert "as they said when they answered" in page


@pytest.mark.slow
def test_a_second_server_on_the_same_folder_is_refused(
    config: Config, world: World, shards: Path, tmp_path: Path
) -> None:
    with RealFleet(config, tmp_path / "real", shards) as fleet:
        fleet.devices.close()  # so that the first server waits
        until((tmp_path / "real" / "run" / "checkpoint" / "begun.json").exists)
        with pytest.raises(LeaseError, match=r"served by another process, process .*; stop it, or wait with --standby"):
            serve(config, tmp_path / "real" / "run", world, fleet.broker.url, resume=True)
        assert fleet.server.is_alive()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.005)


def serve(config: Config, folder: Path, world: World, url: str, **options: Any) -> Summary:
    return run_served(config, folder, broker(url), lambda line: None, task=world.task, **options)


class Spy:
    """Reads all that devices and the server tell each other."""

    def __init__(self, url: str) -> None:
        self.heard: list[tuple[str, Message]] = []
        """Each with the process that said it, or that it was for."""
        self.joined: dict[str, set[str]] = {}
        """The processes that have asked to take part, by their device's name."""
        connected = threading.Event()
        self._link = Link(
            broker(url), "spy", [topics.EVERY_UP, topics.down("+", "+")], received=self._note, connected=connected.set,
            failed=pytest.fail, say=lambda line: None,
        )  # fmt: skip
        self._link.start()
        assert connected.wait(PATIENCE)

    def of(self, kind: type[Message]) -> list[tuple[str, Any]]:
        return [(process, message) for process, message in self.heard if isinstance(message, kind)]

    def close(self) -> None:
        self._link.stop()

    def _note(self, topic: str, payload: bytes) -> None:
        message = decode(payload)
        name, process = topics.sender(topic)
        self.heard.append((process, message))
        if isinstance(message, Join):
            self.joined.setdefault(name, set()).add(process)

    def is_back(self, number: int, before: set[str]) -> bool:
        """Whether a process of a device has joined that was not there before."""
        return not self.joined.get(f"device-{number}", set()) <= before


class Churn:
    """A run in which 3 of 10 devices vanish in every round, and come back in the next: two are killed, one hangs."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder, self.vanished = config, folder / "real", 0
        self.world, self._random = make_world(config), Random(1)
        self._gone: list[int] = []
        shards = shards_of(self.world, folder)
        with (
            Mosquitto.plain() as mosquitto,
            Devices(mosquitto.url, config.data.devices, folder / "devices", shards, save_every=1) as devices,
        ):
            self.spy = Spy(mosquitto.url)
            self.summary = serve(
                config, self.folder, self.world, mosquitto.url, watch=partial(self._strike, devices)
            )  # fmt: skip
            self.spy.close()
        self.rows = rows_of(self.folder)

    def _strike(self, devices: Devices, progress: Progress) -> None:
        """Between two rounds: orders go out to devices that are dead before the broker has told."""
        if progress.done == progress.total:
            return
        # However long a process takes to start, it is back before the next round, and can be asked in those after it.
        before = {number: set(self.spy.joined.get(f"device-{number}", ())) for number in self._gone[1:]}
        for number in before:
            devices.start(number)
        for number in self._gone[:1]:
            devices.go_on(number)
        for number, processes in before.items():
            until(partial(self.spy.is_back, number, processes))
        self._gone = self._random.sample(range(self.config.data.devices), 3)
        self.vanished += len(self._gone)
        devices.hang(self._gone[0])
        for number in self._gone[1:]:
            devices.kill(number)


@pytest.fixture(scope="module", params=["per-device", "shared"])
def churn(request: pytest.FixtureRequest, bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Churn]:
    config = fleet_config(
        bars, rounds=12, data__devices=10, fleet__sample="present", fleet__extra=1, fleet__deadline=0.5,
        fleet__gather=0.5, train__seeds=request.param,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_out_the_slow(monkeypatch.setattr)
        yield Churn(config, tmp_path_factory.mktemp("churn"))


@pytest.mark.slow
def test_a_run_that_loses_devices_in_every_round_finishes_and_can_be_simulated_to_the_bit(
    churn: Churn, tmp_path: Path
) -> None:
    assert churn.vanished == 3 * (churn.config.rounds - 1)
    assert [row["round"] for row in churn.rows] == list(range(1, churn.config.rounds + 1))
    example = read_example(churn.folder, churn.config)
    taken = participants(churn.folder)
    assert example.participants == taken
    run_simulated(churn.config, tmp_path / "again", prepared=churn.world, like=example)
    assert (tmp_path / "again" / "model.fsp").read_bytes() == (churn.folder / "model.fsp").read_bytes()
    assert participants(tmp_path / "again") == taken
    # The devices that answered were not those that a simulation would have asked: the kills made a difference.
    run_simulated(churn.config, tmp_path / "other", prepared=churn.world)
    assert participants(tmp_path / "other") != taken


@pytest.mark.slow
def test_devices_that_were_away_catch_up_by_updates_and_fetch_nothing(churn: Churn) -> None:
    first = dict(reversed(churn.spy.of(Ready)))
    came_back = {process for process, ready in first.items() if ready.held >= 0}
    assert not came_back & {process for process, _ in churn.spy.of(Fetch)}
    missed = [len(order.updates) for process, order in churn.spy.of(OrderMessage) if process in came_back]
    assert max(missed) >= 2


@pytest.mark.slow
def test_metrics_and_summary_of_a_served_run_hold_what_is_promised(churn: Churn) -> None:
    for row in churn.rows:
        assert {"wire_up", "wire_down", "round_overhead_ms", "refused", "participants"} <= row.keys()
        assert row["participants"] == sorted(set(row["participants"]))
        assert len(row["participants"]) == row["devices"] <= churn.config.data.per_round
        assert row["wire_up"] == sum(up for up, _ in row["wire"]) > 0
        assert row["wire_down"] == sum(down for _, down in row["wire"]) > 0
        assert len(row["wire"]) == len(row["peaks_kib"]) == row["devices"]
        assert all(count > 0 for count in row["refused"].values())
    fleet = json.loads((churn.folder / "summary.json").read_text())["fleet"]
    assert fleet == churn.summary.fleet.model_dump()
    assert churn.config.data.per_round <= fleet["devices"] <= churn.config.data.devices
    for key, column in {
        "wire_up_bytes": "wire_up", "wire_down_bytes": "wire_down", "payload_up_bytes": "bytes_up",
        "payload_down_bytes": "bytes_down",
    }.items():  # fmt: skip
        assert fleet[key] == sum(row[column] for row in churn.rows), key
    assert fleet["refused"] == sum((Counter(row["refused"]) for row in churn.rows), Counter())
    assert fleet["round_overhead_ms"] in [row["round_overhead_ms"] for row in churn.rows]
    assert 10 < fleet["device_peak_mb"] < 30
    assert fleet["device_peak_mb"] == max(fleet["device_peaks_kib"].values()) * 1024 / 1e6


@pytest.mark.slow
def test_values_that_have_grown_too_large_are_told_although_no_device_can_answer(
    config: Config, world: World, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreseed.fleet.devices._SILENCE_TIMEOUT", 0.3)
    large = World(replace(world.task, values=1e20 * world.task.values), world.population)
    with (
        Mosquitto.plain() as mosquitto,
        Devices(mosquitto.url, config.data.devices, tmp_path, shards),
        pytest.raises(RunError, match=r"ntk-baffle, round 1: the loss is not finite: .*lower the learning rate"),
    ):
        serve(config, tmp_path / "run", large, mosquitto.url)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"method": "fedavg"}, "method fedavg backpropagates, which devices cannot; expected ntk-baffle or baffle"),
        ({"engine": "exact"}, 'engine "exact" is a simulation; real devices take engine = "difference"'),
        ({"fleet__min_replies": 4}, "fleet.min_replies 4 never come of data.per_round 3 devices"),
    ],
)
def test_what_a_real_fleet_cannot_run_is_refused(changes: dict[str, Any], complaint: str, bars: Path) -> None:
    check(fleet_config(bars))
    with pytest.raises(ConfigError) as refusal:
        check(fleet_config(bars, **changes))
    assert str(refusal.value) == complaint


@pytest.mark.parametrize("damage", [b"what is this?", b'{"device-0": "zero"}', b'{"device-0": -1}', b"[]", b""])
def test_damaged_enrolments_are_told_and_nothing_is_changed(damage: bytes, bars: Path, tmp_path: Path) -> None:
    config = fleet_config(bars)
    enrolled = tmp_path / "run" / "checkpoint" / "devices.json"
    enrolled.parent.mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(config.to_toml())
    enrolled.write_bytes(damage)
    with pytest.raises(RunError, match=r"devices\.json is damaged: it holds which device has which number; put it"):
        # It is found before anybody is asked, so there need not be a broker.
        serve(config, tmp_path / "run", make_world(config), "mqtt://localhost:9", resume=True)
    assert enrolled.read_bytes() == damage

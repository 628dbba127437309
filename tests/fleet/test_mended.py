"""A served run goes back, its devices with it; and how the fleet stands is in the run's folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from foreseed.cli import main
from foreseed.config import Config
from foreseed.data import load, shard_name, write_shards
from foreseed.fleet.experiment import run_served
from foreseed.runs import Progress, Summary, times_gone_back
from foreseed.runs.status import read_status
from foreseed.simulate import read_example, run_simulated
from foreseed.transport.link import broker
from foreseed.wire import STATE, Fetch
from tests.fleet.broker import Mosquitto
from tests.fleet.kills import Devices, RealFleet, Unhurried, fleet_config
from tests.fleet.test_served import PATIENCE, Spy
from tests.simulate.small import World, make_world

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(fleet_config(bars, rounds=16))


@pytest.fixture(scope="module")
def shards(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(load(world.config.data.set), world.population.partition, folder / "shards")
    return folder / "shards"


def serve(config: Config, folder: Path, world: World, url: str, said: list[str], **options: Any) -> Summary:
    return run_served(config, folder, broker(url), said.append, task=world.task, **options)


def stop_at(round: int) -> Any:
    def stop(progress: Progress) -> None:
        if progress.done == round and progress.row is not None:
            raise KeyboardInterrupt

    return stop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "changes"),
    [({}, {}), ({}, {"train.lr": 0.003, "train.robust": "clip", "train.k": 4}), ({"train__memory": True}, {})],
)
def test_devices_of_later_rounds_follow_a_server_that_went_back_to_the_simulator_s_bits(
    settings: dict[str, Any], changes: dict[str, Any], world: World, shards: Path, tmp_path: Path
) -> None:
    world, said = world.changed(**settings), []
    config = world.config
    with Mosquitto.plain() as mosquitto, Devices(mosquitto.url, config.data.devices, tmp_path, shards, save_every=1):
        with pytest.raises(KeyboardInterrupt):
            serve(config, tmp_path / "run", world, mosquitto.url, said, watch=stop_at(14))
        spy = Spy(mosquitto.url)
        serve(config, tmp_path / "run", world, mosquitto.url, said, resume=True, at=10, changes=changes)
        spy.close()
    with pytest.raises(KeyboardInterrupt):
        run_simulated(config, tmp_path / "simulated", prepared=world, watch=stop_at(14))
    run_simulated(config, tmp_path / "simulated", prepared=world, resume=True, at=10, changes=changes)
    assert (tmp_path / "run" / "model.fsp").read_bytes() == (tmp_path / "simulated" / "model.fsp").read_bytes()
    assert len((tmp_path / "run" / "abandoned-1.jsonl").read_text().splitlines()) == 4
    assert times_gone_back(tmp_path / "run") == 1
    # Whoever was asked in the first round of the new branch holds nothing of it, and fetches the values of round 10.
    fetched = {process for process, fetch in spy.of(Fetch) if (fetch.what, fetch.round) == (STATE, 10)}
    assert len(fetched) == config.data.per_round
    assert not [line for line in said if "announced at this broker too" in line]
    if not changes:
        run_simulated(config, tmp_path / "whole", prepared=world)
        assert (tmp_path / "run" / "model.fsp").read_bytes() == (tmp_path / "whole" / "model.fsp").read_bytes()


@pytest.mark.slow
def test_devices_without_numbers_are_known_by_the_record_when_the_run_is_simulated(
    bars: Path, world: World, shards: Path, tmp_path: Path
) -> None:
    config = world.config.with_({"rounds": 4})
    with Mosquitto.plain() as mosquitto:
        devices = Devices(mosquitto.url, 0, tmp_path, shards)
        started = set[int]()
        # Whoever comes first is device 0: the last shard.
        shard_of = {number: shard_name(config.data.devices - 1 - number) for number in range(config.data.devices)}

        def join(table: Any) -> None:
            """One after the other."""
            if len(table) == len(started) < config.data.devices and all(device.enrolled for device in table.values()):
                number = len(table)
                started.add(number)
                devices.start(number, name=f"board-{'abcdef'[number]}", shard=shard_of[number], numbered=False)

        with devices:
            serve(config, tmp_path / "run", world, mosquitto.url, [], look=join)
    simulated = {"prepared": World(world.task, world.population), "like": read_example(tmp_path / "run", config)}
    run_simulated(config, tmp_path / "again", **simulated)
    assert (tmp_path / "again" / "model.fsp").read_bytes() == (tmp_path / "run" / "model.fsp").read_bytes()
    run_simulated(config, tmp_path / "other", prepared=world)
    assert (tmp_path / "other" / "model.fsp").read_bytes() != (tmp_path / "run" / "model.fsp").read_bytes()


@pytest.mark.slow
def test_the_fleet_s_status_is_there_while_the_server_runs_when_it_is_killed_and_after(
    world: World, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = world.config.with_({"rounds": 40}), tmp_path / "real" / "run"
    with RealFleet(config, tmp_path / "real", shards, Unhurried) as fleet:
        until(lambda: (folder / "status.json").exists() and len(read_status(folder).devices) == 6)
        fleet.devices.hang(2)
        until(lambda: read_status(folder).awaited == (2,))
        status = read_status(folder)
        assert status.server == "running"
        assert [device.name for device in status.devices] == [f"device-{number}" for number in range(6)]
        assert [device.awaited for device in status.devices] == [False, False, True, False, False, False]
        answered = [device for device in status.devices if device.peak_kib]
        assert answered
        for device in answered:
            assert device.samples == world.population.partition.sizes[device.number]
            assert min(device.sent, device.received) > 0
            assert status.written - 60 < device.last_seen <= status.written
        assert main(["fleet", "status", str(folder)]) == 0
        shown = capsys.readouterr().out
        assert "waiting for: device-2 (device 2)" in shown
        fleet.server.kill()
        fleet.server.join()
        assert read_status(folder).server == "stopped"
        assert main(["fleet", "status", str(folder)]) == 0
        assert "no server is running" in capsys.readouterr().out
        fleet.devices.go_on(2)
        fleet.start_server()
        fleet.finish()
    assert main(["fleet", "status", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["server"], told["round"], told["awaited"]) == ("over", 40, [])


@pytest.mark.slow
def test_a_device_whose_shard_is_cut_short_stays_and_answers_when_it_is_back(
    world: World, shards: Path, tmp_path: Path
) -> None:
    world, own = world.changed(rounds=20), tmp_path / "shards"
    config = world.config
    write_shards(load(config.data.set), world.population.partition, own)
    with RealFleet(config, tmp_path / "real", own, Unhurried) as fleet:
        until(lambda: fleet.rounds >= 2)
        good = (own / shard_name(1)).read_bytes()
        os.truncate(own / shard_name(1), 100)
        until(lambda: "no answer" in fleet.devices.log(1))
        (own / "new").write_bytes(good)
        (own / "new").replace(own / shard_name(1))
        fleet.finish()
        said = [line for line in fleet.devices.log(1).splitlines() if "no answer" in line]
    assert len(said) == 1
    assert "100 bytes are no whole number of records" in said[0]
    run_simulated(config, tmp_path / "simulated", prepared=world)
    assert (tmp_path / "real" / "run" / "model.fsp").read_bytes() == (tmp_path / "simulated" / "model.fsp").read_bytes()


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_folder_without_a_fleet_has_no_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "status", str(tmp_path)]) == 2
    assert "no fleet was served there" in capsys.readouterr().err

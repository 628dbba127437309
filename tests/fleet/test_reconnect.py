"""The server's own connection breaks while those of its devices last: nothing may be lost."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import ClassVar

import pytest

from foreseed.data import load, write_shards
from foreseed.fleet.experiment import run_served
from foreseed.fleet.local import Mosquitto
from foreseed.simulate import run_simulated
from foreseed.transport.link import Link, broker
from foreseed.wire import OrderMessage, decode
from tests.fleet.kills import Devices, fleet_config
from tests.simulate.small import leave_out_the_slow, make_world, write_bars


class CutLink(Link):
    """A link whose connection is cut when it has sent the first order of every third round."""

    cut: ClassVar[set[int]] = set()

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        super().publish(topic, payload, retain)
        message = decode(payload)
        if isinstance(message, OrderMessage) and message.round % 3 == 0 and message.round not in self.cut:
            self.cut.add(message.round)
            assert self._socket is not None
            self._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("sample", ["all", "present"])
def test_a_server_that_loses_its_connection_alone_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: str
) -> None:
    leave_out_the_slow(monkeypatch.setattr)
    monkeypatch.setattr("foreseed.transport.loop.Link", CutLink)
    CutLink.cut.clear()
    config = fleet_config(write_bars(tmp_path / "bars.npz"), rounds=7, fleet__sample=sample)
    world = make_world(config)
    write_shards(load(config.data.set), world.population.partition, tmp_path / "shards")
    simulated, served = tmp_path / "simulated", tmp_path / "served"
    with Mosquitto.plain() as mosquitto, Devices(
        mosquitto.url, config.data.devices, tmp_path / "devices", tmp_path / "shards"
    ) as devices:  # fmt: skip
        run_served(config, served, broker(mosquitto.url), lambda line: None)
        assert devices.wait() == [0] * config.data.devices
    assert CutLink.cut == {3, 6}
    if sample == "all":
        run_simulated(config, simulated, prepared=world)
        assert (served / "model.fsp").read_bytes() == (simulated / "model.fsp").read_bytes()

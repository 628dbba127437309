"""The server's own connection breaks while those of its devices last: nothing may be lost."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from foreseed.data import write_shards
from foreseed.serve.local import Mosquitto
from foreseed.serve.served import ServedFleet
from foreseed.server import Coordinator
from foreseed.simulate import make_world, run
from foreseed.transport.link import broker
from foreseed.wire import OrderMessage
from tests.serve.kills import Devices, fleet_config
from tests.simulate.small import leave_out_the_slow, write_bars


class Cut(ServedFleet):
    """A server whose connection is cut whenever it has sent orders of every third round."""

    cuts = 0

    def hold_round(self, coordinator: Coordinator) -> dict[str, Any]:
        self._to_cut = coordinator.round % 3 == 0
        return super().hold_round(coordinator)

    def _send(self, sends: Any) -> None:
        super()._send(sends)
        if self._to_cut and any(isinstance(send.message, OrderMessage) for send in sends):
            self._to_cut = False
            type(self).cuts += 1
            assert self._link is not None
            client = self._link._client
            assert client is not None
            connection = client.socket()
            assert connection is not None
            connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("sample", ["all", "present"])
def test_a_server_that_loses_its_connection_alone_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: str
) -> None:
    leave_out_the_slow(monkeypatch.setattr)
    monkeypatch.setattr(Cut, "cuts", 0)
    config = fleet_config(write_bars(tmp_path / "bars.npz"), rounds=7, fleet__sample=sample)
    world = make_world(config)
    write_shards(world.data, world.partition, tmp_path / "shards")
    simulated, served = tmp_path / "simulated", tmp_path / "served"
    with Mosquitto.plain() as mosquitto, Devices(
        mosquitto.url, config.data.devices, tmp_path / "devices", tmp_path / "shards"
    ) as devices:  # fmt: skip
        run(
            config, served, world=world,
            devices=lambda world: Cut(world, served, broker(mosquitto.url), lambda line: None),
        )  # fmt: skip
        assert devices.wait() == [0] * config.data.devices
    assert Cut.cuts == 2
    if sample == "all":
        run(config, simulated, world=world)
        assert (served / "model.fsp").read_bytes() == (simulated / "model.fsp").read_bytes()

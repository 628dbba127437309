"""NATS as we configure it, a real nats-server: the same checks as of mosquitto, and of what it has beside MQTT."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from foreseed.fleet.keys import Identity, make_keys
from foreseed.fleet.local_nats import LOOPBACK, NatsCluster
from tests.fleet import test_security as of_mosquitto
from tests.fleet.clients import Client, Fleet, Kind, wait

MINE = of_mosquitto.MINE
CERTIFICATE: Kind = "certificate"
BESIDE_MQTT = ["$MQTT/#", "$MQTT/sub/#", "$MQTT/sub/+", "$JS/#", "$SYS/#", "_INBOX/#", ">", "foreseed.1.>"]

WITH_A_KIND = [
    partial(of_mosquitto.test_a_name_with_its_keys_gets_in, name="server"),
    partial(of_mosquitto.test_a_name_with_its_keys_gets_in, name="device-1"),
    of_mosquitto.test_nobody_gets_in_without_tls,
    of_mosquitto.test_tls_of_another_age_is_refused,
    of_mosquitto.test_a_device_writes_its_own_presence_and_replies,
    of_mosquitto.test_a_device_reads_its_own_orders_and_the_broadcast,
    of_mosquitto.test_the_last_will_of_a_device_that_dies_is_its_presence,
    partial(of_mosquitto.test_what_a_device_writes_elsewhere_reaches_nobody, retain=False),
    partial(of_mosquitto.test_what_a_device_writes_elsewhere_reaches_nobody, retain=True),
    of_mosquitto.test_the_presence_of_another_device_cannot_be_cleared,
    partial(of_mosquitto.test_a_last_will_elsewhere_reaches_nobody, topic="foreseed/1/d/device-2/here"),
    partial(of_mosquitto.test_a_last_will_elsewhere_reaches_nobody, topic="foreseed/1/all"),
    *(
        partial(of_mosquitto.test_a_device_reads_nothing_of_others, wildcard=wildcard)
        for wildcard in (None, *of_mosquitto.WILDCARDS)
    ),
]
WITHOUT = [
    partial(of_mosquitto.test_control_the_server_reads_all_that_a_device_does_not, wildcard=None),
    partial(of_mosquitto.test_control_the_server_reads_all_that_a_device_does_not, wildcard="foreseed/1/#"),
    partial(of_mosquitto.test_control_the_server_reads_all_that_a_device_does_not, wildcard="foreseed/1/d/+/down/+"),
    partial(of_mosquitto.test_the_brokers_own_certificate_lets_nobody_in, file="device-1", expected="connected"),
    partial(of_mosquitto.test_the_brokers_own_certificate_lets_nobody_in, file="nats/broker", expected="closed"),
    partial(
        of_mosquitto.test_the_brokers_own_certificate_lets_nobody_in, file="nats/node",
        expected="refused: Not authorized",
    ),
    partial(of_mosquitto.test_nobody_gets_in_without_a_name, kind=CERTIFICATE, expected="closed"),
]  # fmt: skip
WITH_FILES = [
    partial(
        of_mosquitto.test_only_a_certificate_of_our_ca_that_has_not_ended_gets_in,
        ours=ours, ended=ended, expected=expected,
    )
    for ours, ended, expected in [(True, False, "connected"), (True, True, "closed"), (False, False, "closed")]
] + [of_mosquitto.test_a_device_refuses_a_broker_of_another_ca]  # fmt: skip


class NatsFleet(Fleet):
    """One node on a folder of keys."""

    def __init__(self, keys: Path) -> None:
        self.keys, self.nats = keys, NatsCluster.of(keys)
        self.broker = self.nats.nodes[0]  # type: ignore[assignment]
        self.clients = []

    def has_ended(self, client: Client) -> bool:
        return f'"{client.name}"' not in self.broker.connections

    def port(self, kind: Kind) -> int:
        assert kind == CERTIFICATE
        return self.broker.ports[0]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "keys"
    make_keys(folder, ["device-1", "device-2", "device-10"], for_nats=True)
    return folder


@pytest.fixture(scope="module")
def broker(keys: Path) -> Iterator[Fleet]:
    running = NatsFleet(keys)
    with running.nats:
        yield running


fleet = of_mosquitto.fleet


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[NatsFleet]:
    """A broker of the test's own, to change its files."""
    make_keys(tmp_path / "keys", ["device-1", "device-2"], for_nats=True)
    running = NatsFleet(tmp_path / "keys")
    with running.nats:
        yield running
        running.forget()


def named(check: object) -> str:
    options = getattr(check, "keywords", {}).values()
    return "-".join([getattr(check, "func", check).__name__.removeprefix("test_"), *map(str, options)])  # type: ignore[attr-defined]


@pytest.mark.parametrize("check", WITH_A_KIND, ids=named)
def test_as_on_mosquitto(check: Callable[..., None], fleet: Fleet) -> None:
    check(fleet, kind=CERTIFICATE)


@pytest.mark.parametrize("check", WITHOUT, ids=named)
def test_as_on_mosquitto_whatever_the_kind(check: Callable[..., None], fleet: Fleet) -> None:
    check(fleet)


@pytest.mark.parametrize("check", WITH_FILES, ids=named)
def test_as_on_mosquitto_with_other_keys(check: Callable[..., None], fleet: Fleet, tmp_path: Path) -> None:
    check(fleet, tmp_path)


@pytest.mark.parametrize(("claimed", "expected"), [("server", "refused: Not authorized"), ("", "connected")])
def test_a_certificate_is_of_no_use_under_another_name(fleet: Fleet, claimed: str, expected: str) -> None:
    device = fleet.client("device-1")
    if claimed:
        device.username_pw_set(claimed, Identity(fleet.keys, claimed).password.read_text().strip())
    assert fleet.outcome(device, CERTIFICATE) == expected


# What NATS has beside MQTT.


@pytest.mark.parametrize("topic", BESIDE_MQTT)
def test_a_device_reads_nothing_of_what_lies_under_mqtt(fleet: Fleet, topic: str) -> None:
    of_mosquitto.test_a_device_reads_nothing_of_others(fleet, CERTIFICATE, topic)


@pytest.mark.parametrize("topic", ["$MQTT/msgs/foreseed.1.all", "$MQTT/rmsgs", "$JS/API/STREAM/DELETE/$MQTT_rmsgs"])
def test_a_device_writes_nothing_under_mqtt(fleet: Fleet, topic: str) -> None:
    server, device = fleet.connect("server"), fleet.connect("device-1")
    server.say("foreseed/1/all", b"announce", retain=True)
    device.say(topic, b"forged", retain=False)
    other = fleet.connect("device-2")
    other.read("foreseed/1/all")
    wait(lambda: other.got == [("foreseed/1/all", b"announce")], other)


def greet(address: tuple[str, int], keys: Path, file: str, **login: str) -> str:
    """Say hello in NATS's own protocol, with a certificate; gives the server's answer."""
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    context.load_cert_chain(keys / f"{file}.crt", keys / f"{file}.key")
    with socket.create_connection(address, timeout=20.0) as plain:
        if "user" not in login:  # a client waits for a word first, a node does not
            assert plain.recv(4096).startswith(b"INFO")
        with context.wrap_socket(plain, server_hostname=address[0]) as secure:
            options = {"verbose": False, "pedantic": False, "tls_required": True} | login
            secure.sendall(f"CONNECT {json.dumps(options)}\r\nPING\r\n".encode())
            heard = b""
            try:
                while b"PONG" not in heard and b"-ERR" not in heard and (more := secure.recv(4096)):
                    heard += more
            except OSError:
                pass
            return "in" if b"PONG" in heard else "out"


def test_natss_own_port_lets_nobody_in(own_fleet: NatsFleet) -> None:
    address = ("127.0.0.1", own_fleet.broker.ports[1])
    for name in ("server", "device-1"):
        assert greet(address, own_fleet.keys, name) == "out"
    # Control: without the line that says so, it would.
    users = own_fleet.keys / "nats" / "users.conf"
    users.write_text(users.read_text().replace('"allowed_connection_types": ["MQTT"], ', ""))
    own_fleet.broker.restart()
    assert greet(address, own_fleet.keys, "device-1") == "in"


# The fleet changes while the broker runs.


def test_a_new_device_gets_in_without_a_restart(own_fleet: NatsFleet) -> None:
    here = own_fleet.connect("server")
    make_keys(own_fleet.keys, ["device-3"])
    assert own_fleet.outcome(own_fleet.client("device-3"), CERTIFICATE) == "refused: Not authorized"
    os.kill(own_fleet.broker.pid, signal.SIGHUP)
    wait(lambda: own_fleet.outcome(own_fleet.client("device-3"), CERTIFICATE) == "connected", here)
    assert here.state == "connected"


def test_a_device_that_is_shut_out_is_thrown_out_and_stays_out(own_fleet: NatsFleet) -> None:
    server, device, other = (own_fleet.connect(name) for name in ("server", "device-1", "device-2"))
    # As the comment in the file says.
    users = own_fleet.keys / "nats" / "users.conf"
    users.write_text(re.sub('.*CN=device-1".*\n', "", users.read_text()))
    os.kill(own_fleet.broker.pid, signal.SIGHUP)
    wait(lambda: device.state == "closed", device, server, other)
    make_keys(own_fleet.keys, ["device-1", "device-2"])
    os.kill(own_fleet.broker.pid, signal.SIGHUP)
    assert own_fleet.outcome(own_fleet.client("device-1"), CERTIFICATE) == "refused: Not authorized"
    assert (server.state, other.state) == ("connected", "connected")


def test_no_device_can_pass_for_the_broker(own_fleet: NatsFleet) -> None:
    assert of_mosquitto.shake_hands(own_fleet.broker.ports[0], own_fleet.keys, any_host=True) is not None
    for kind in ("crt", "key"):
        shutil.copy(own_fleet.keys / f"device-2.{kind}", own_fleet.keys / "nats" / f"broker.{kind}")
    own_fleet.broker.restart()
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        of_mosquitto.shake_hands(own_fleet.broker.ports[0], own_fleet.keys, any_host=True)


# Nodes.


def test_no_device_can_pass_for_a_node(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["device-1"], LOOPBACK, for_nats=True)
    with NatsCluster.of(keys) as cluster:
        address = (LOOPBACK[0], cluster.nodes[0].ports[2])
        (password,) = set(re.findall('password: "(.*)"', (keys / "nats" / f"{LOOPBACK[0]}.conf").read_text()))
        for file, word in (("device-1", "guessed"), ("device-1", ""), ("nats/node", "guessed")):
            assert greet(address, keys, file, user="node", **{"pass": word}, name="x", cluster="foreseed") == "out"
        assert (
            greet(address, keys, "nats/node", user="node", **{"pass": password}, name="x", cluster="foreseed") == "in"
        )

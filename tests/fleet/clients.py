"""Plain MQTT clients for tests: they know nothing of foreseed, and could be anybody."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import paho.mqtt.client as mqtt

from foreseed.fleet.keys import Identity
from tests.fleet.broker import Mosquitto

Kind = Literal["certificate", "password"]
KINDS: tuple[Kind, ...] = ("certificate", "password")
PATIENCE = 300.0


class Client(mqtt.Client):
    """A plain MQTT client that notes what happens to it; `wait` keeps it going."""

    def __init__(self, protocol: mqtt.MQTTProtocolVersion = mqtt.MQTTv311) -> None:
        self.name = f"test-{os.urandom(8).hex()}"
        super().__init__(mqtt.CallbackAPIVersion.VERSION2, client_id=self.name, protocol=protocol)
        self.state = "new"
        self.got: list[tuple[str, bytes]] = []
        self.acknowledged: list[str] = []
        self.subscribed = 0
        # Nagle's algorithm would make every wait here 40 ms longer.
        self.on_socket_open = lambda client, data, sock: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_connect = self._connected
        self.on_disconnect = self._disconnected
        self.on_message = lambda client, data, message: self.got.append((message.topic, message.payload))
        self.on_publish = lambda client, data, number, reason, properties: self.acknowledged.append(str(reason))
        self.on_subscribe = self._taken

    def _connected(self, client, data, flags, reason, properties) -> None:  # type: ignore[no-untyped-def]
        self.state = "connected" if reason == 0 else f"refused: {reason}"

    def _disconnected(self, client, data, flags, reason, properties) -> None:  # type: ignore[no-untyped-def]
        if not self.state.startswith("refused"):
            self.state = "closed"

    def _taken(self, client, data, number, reasons, properties) -> None:  # type: ignore[no-untyped-def]
        self.subscribed += 1

    def read(self, *topics: str) -> None:
        """Subscribe, and wait for the broker's word on it."""
        wanted = self.subscribed + len(topics)
        for topic in topics:
            self.subscribe(topic, 1)
        wait(lambda: self.subscribed == wanted, self)

    def say(self, topic: str, payload: bytes = b"x", retain: bool = False) -> str:
        """Publish, and give the broker's answer."""
        wanted = len(self.acknowledged) + 1
        self.publish(topic, payload, 1, retain)
        wait(lambda: len(self.acknowledged) == wanted or self.state == "closed", self)
        return self.acknowledged[-1] if self.state == "connected" else self.state


def wait(until: Callable[[], bool], *clients: Client) -> None:
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end, [(client.state, client.got) for client in clients]
        for client in clients:
            client.loop(0.005)


class Fleet:
    """A broker on a folder of keys, and clients that end with the test."""

    def __init__(self, keys: Path) -> None:
        self.keys, self.broker = keys, Mosquitto.secure(keys)
        self.clients: list[Client] = []

    def client(
        self, name: str, kind: Kind = "certificate", protocol: mqtt.MQTTProtocolVersion = mqtt.MQTTv311
    ) -> Client:
        """A client that shows who it is with its own keys."""
        identity, client = Identity(self.keys, name), Client(protocol=protocol)
        if kind == "certificate":
            client.tls_set(str(identity.ca), str(identity.cert), str(identity.key))
        else:
            client.tls_set(str(identity.ca))
            client.username_pw_set(name, identity.password.read_text().strip())
        return client

    def has_ended(self, client: Client) -> bool:
        """Whether the broker has noticed that a client is gone."""
        return f"Client {client.name} closed" in self.broker.log

    def port(self, kind: Kind) -> int:
        return self.broker.port if kind == "certificate" else self.broker.password_port

    def outcome(self, client: Client, kind: Kind) -> str:
        """What becomes of a connection: connected, closed, or refused with a reason."""
        self.clients.append(client)
        try:
            client.connect("127.0.0.1", self.port(kind))
        except ConnectionError:
            return "closed"
        wait(lambda: client.state != "new", client)
        return client.state

    def connect(
        self, name: str, kind: Kind = "certificate", protocol: mqtt.MQTTProtocolVersion = mqtt.MQTTv311
    ) -> Client:
        client = self.client(name, kind, protocol)
        assert self.outcome(client, kind) == "connected"
        return client

    def forget(self) -> None:
        """End all clients."""
        for client in self.clients:
            client.disconnect()
        self.clients = []

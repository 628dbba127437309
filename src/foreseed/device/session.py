"""A device's process at a broker: its topics, its presence, and the member behind them. A device loads this module."""

from __future__ import annotations

import os

from foreseed.transport import topics
from foreseed.wire import Presence, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from foreseed.transport.link import Broker, Link, Publication
    from foreseed.transport.loop import Loop
    from foreseed.wire import Message

    class DeviceSide(Protocol):
        """A `Member`, or what stands before one."""

        @property
        def epoch(self) -> bytes: ...
        def connected(self) -> Sequence[Message]: ...
        def receive(self, data: bytes) -> Sequence[Message]: ...
        def work(self) -> Sequence[Message]: ...
        def tick(self, now: float) -> Sequence[Message]: ...


class Session:
    """Carries a member's messages to and from its topics, and tells the server whether its process is here."""

    def __init__(self, name: str, member: DeviceSide) -> None:
        self._name, self._member, self._instance = name, member, os.urandom(4)
        self._up = topics.up(name, self._instance.hex())
        self._link: Link | None = None

    def connect(self, loop: Loop, broker: Broker, say: Callable[[str], None]) -> None:
        """Have the loop drive this session, until `close`; `say` takes a line for the user."""
        instance, (topic, payload, _) = self._instance.hex(), self._presence(False)
        subscriptions = [topics.ALL, topics.down(self._name, instance)]
        self._link = loop.connect(self, broker, f"{self._name}-{instance}", subscriptions, say, (topic, payload))

    def close(self) -> None:
        """Tell the server, and end the connection."""
        if self._link is not None:
            self._link.stop(self._presence(False))

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received on the socket so far."""
        return (0, 0) if self._link is None else self._link.traffic

    def connected(self) -> list[Publication]:
        return [self._presence(True), *self._publications(self._member.connected())]

    def receive(self, topic: str, payload: bytes) -> list[Publication]:
        # An announcement that was cleared is no message.
        if topic == topics.ALL and not payload:
            return []
        epoch = self._member.epoch
        messages = self._publications(self._member.receive(payload))
        # A server that has just started knows nobody.
        return messages if self._member.epoch == epoch else [self._presence(True), *messages]

    def work(self) -> list[Publication]:
        return self._publications(self._member.work())

    def tick(self, now: float) -> list[Publication]:
        return self._publications(self._member.tick(now))

    def _publications(self, messages: Sequence[Message]) -> list[Publication]:
        return [(self._up, encode(message), False) for message in messages]

    def _presence(self, here: bool) -> Publication:
        return topics.here(self._name), encode(Presence(self._instance, here)), True

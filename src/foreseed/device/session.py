"""A device's process at a broker: its topics, its presence, and its member. A device loads this module."""

from __future__ import annotations

import os
import time

from foreseed.transport import topics
from foreseed.wire import Presence, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from foreseed.device.member import Member
    from foreseed.transport.link import Broker, Link, Publication
    from foreseed.transport.loop import Loop
    from foreseed.wire import Message

    Hook = Callable[[Sequence[Message]], None]


_QUIET = 60.0
"""Seconds without a message after which a device of a cluster asks whether it missed an announcement."""


class Session:
    """Carries a member's messages to and from its topics, and tells the server whether its process is here."""

    def __init__(
        self, name: str, member: Member, received: Hook = lambda messages: None, worked: Hook = lambda messages: None
    ) -> None:
        """`received` and `worked` are called when the member has, with what it said to that, once it is sent."""
        self._name, self._member, self._received, self._worked = name, member, received, worked
        self._instance = os.urandom(4)
        self._link: Link | None = None

    def connect(self, loop: Loop, broker: Broker, say: Callable[[str], None]) -> None:
        """Have the loop drive this session, until `close`; `say` takes a line for the user."""
        instance = self._instance.hex()
        subscriptions, will = [topics.ALL, topics.down(self._name, instance)], self._presence(False)[:2]
        self._link = loop.connect(self, broker, f"{self._name}-{instance}", subscriptions, say, will, _QUIET)

    def close(self) -> None:
        """Tell the server, and end the connection."""
        if self._link is not None:
            self._link.stop(self._presence(False))

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received on the socket so far."""
        return (0, 0) if self._link is None else self._link.traffic

    def connected(self) -> Iterator[Publication]:
        yield self._presence(True)
        yield from self._up(self._member.connected())

    def receive(self, topic: str, payload: bytes) -> Iterator[Publication]:
        # An announcement that was cleared is no message.
        if topic == topics.ALL and not payload:
            return
        epoch = self._member.epoch
        messages = self._member.receive(payload)
        if self._member.epoch != epoch:
            yield self._presence(True)  # a server that has just started knows nobody
        yield from self._up(messages)
        self._received(messages)

    def work(self) -> Iterator[Publication]:
        messages = self._member.work()
        yield from self._up(messages)
        self._worked(messages)
        yield from self._up(self._member.tick(time.monotonic()))

    def _up(self, messages: Sequence[Message]) -> Iterator[Publication]:
        for message in messages:
            yield topics.up(self._name, self._instance.hex()), encode(message), False

    def _presence(self, here: bool) -> Publication:
        return topics.here(self._name), encode(Presence(self._instance, here)), True

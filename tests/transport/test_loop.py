"""The loop: what happens to a link reaches its party, what the party returns is published."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from foreseed.transport import loop as loop_module
from foreseed.transport.inbox import Inbox
from foreseed.transport.link import LinkError, Publication, broker
from foreseed.transport.loop import Loop
from tests.fleet.broker import Mosquitto

PATIENCE = 300.0
"""Seconds after which a test gives up waiting; what it waits for takes moments."""


class Echo:
    """A party that notes its calls, and publishes each of them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def connected(self) -> list[Publication]:
        return self._note("connected")

    def receive(self, topic: str, payload: bytes) -> list[Publication]:
        return self._note((topic, payload))

    def work(self) -> list[Publication]:
        return self._note("work")

    def _note(self, call: Any) -> list[Publication]:
        self.calls.append(call)
        return [("said", str(call).encode(), False)]


class FakeLink:
    """A link that does what a test says, and notes what was published."""

    made: list[FakeLink]

    def __init__(
        self, *_: object, received: Callable[[str, bytes], None], connected: Callable[[], None],
        failed: Callable[[LinkError], None], **__: object,
    ) -> None:  # fmt: skip
        self.received, self.connected, self.failed = received, connected, failed
        self.started, self.published = False, list[bytes]()
        self.made.append(self)

    def start(self) -> None:
        self.started = True

    def publish(self, topic: str, payload: bytes, retain: bool) -> None:
        assert (topic, retain) == ("said", False)
        self.published.append(payload)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeLink]]:
    """The links of parties that are connected without a broker."""
    monkeypatch.setattr(loop_module, "Link", FakeLink)
    monkeypatch.setattr(loop_module, "_TICK", 0.01)
    FakeLink.made = []
    yield FakeLink.made
    assert all(link.started for link in FakeLink.made)


def connect(loop: Loop) -> Echo:
    party = Echo()
    loop.connect(party, broker("mqtt://localhost"), "me", ["x"], lambda line: None)
    return party


def test_events_reach_the_party_they_are_for_and_what_it_returns_its_own_link(links: list[FakeLink]) -> None:
    loop = Loop()
    first, second = connect(loop), connect(loop)
    links[1].connected()
    links[0].received("x", b"hello")
    links[1].received("y", b"")
    assert [loop.deliver(0.0) for _ in range(4)] == [True, True, True, False]
    assert (first.calls, second.calls) == ([("x", b"hello")], ["connected", ("y", b"")])
    assert (links[0].published, links[1].published) == ([b"('x', b'hello')"], [b"connected", b"('y', b'')"])


def test_all_that_happened_is_received_before_any_of_it_is_worked_on(links: list[FakeLink]) -> None:
    loop = Loop()
    party = connect(loop)
    links[0].connected()
    links[0].received("x", b"1")
    links[0].received("x", b"2")
    loop.run(lambda: len(party.calls) > 4)
    assert party.calls == ["work", "connected", ("x", b"1"), ("x", b"2"), "work"]
    assert len(links[0].published) == len(party.calls)


def test_parties_work_from_time_to_time_while_nothing_happens(links: list[FakeLink]) -> None:
    loop = Loop()
    party = connect(loop)
    loop.run(lambda: len(party.calls) == 3)
    assert party.calls == 3 * ["work"]


def test_a_stop_ends_the_loop_and_what_comes_after_it_is_left_alone(links: list[FakeLink]) -> None:
    loop = Loop()
    party = connect(loop)
    links[0].received("x", b"before")
    other = threading.Thread(target=loop.stop)
    other.start()
    other.join()
    links[0].received("x", b"after")
    loop.run()
    assert party.calls == ["work", ("x", b"before")]


def test_a_link_that_fails_ends_the_loop_with_its_error(links: list[FakeLink]) -> None:
    loop = Loop()
    connect(loop)
    links[0].failed(LinkError("refused"))
    with pytest.raises(LinkError, match="refused"):
        loop.run()


def test_an_inbox_that_drops_a_message_keeps_it_from_the_party(links: list[FakeLink]) -> None:
    inbox = Inbox(max_bytes=3)
    loop = Loop(inbox)
    party = connect(loop)
    links[0].received("x", b"long")
    links[0].received("x", b"ok")
    assert [loop.deliver(0.0), loop.deliver(0.0)] == [True, False]
    assert party.calls == [("x", b"ok")]
    assert inbox.dropped == {"too long": 1}


def test_a_party_on_a_real_broker_is_connected_and_hears_itself() -> None:
    loop, party, end = Loop(), Echo(), time.monotonic() + PATIENCE
    with Mosquitto.plain() as mosquitto:
        link = loop.connect(party, broker(mosquitto.url), "me", ["said"], lambda line: None)
        loop.run(lambda: ("said", b"connected") in party.calls or time.monotonic() > end)
        link.stop()
    assert party.calls.index("connected") < party.calls.index(("said", b"connected"))

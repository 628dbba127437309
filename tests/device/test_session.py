"""A device's session: its member's messages on its own topics, and its presence for the server to see."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from foreseed.device.member import Member
from foreseed.device.session import Session
from foreseed.transport import loop as loop_module
from foreseed.transport import topics
from foreseed.transport.link import Publication, broker
from foreseed.transport.loop import Loop
from foreseed.wire import PROGRAM, Fetch, Join, Message, Presence, Ready, Reply, decode, encode
from tests.device.scripted import serve


class NotedLink:
    """What a session asks of its link."""

    traffic = (3, 4)

    def __init__(
        self, _: object, client_id: str, subscriptions: list[str], *, will: tuple[str, bytes], **__: object
    ) -> None:
        self.client_id, self.subscriptions, self.will = client_id, subscriptions, will
        self.last: tuple[Publication, ...] = ()

    def start(self) -> None:
        pass

    def stop(self, *last: Publication) -> None:
        self.last = last


@pytest.fixture
def session(shard: Path) -> Session:
    return Session("kitchen", Member(shard))


def messages(publications: Iterable[Publication]) -> list[Message]:
    return [decode(payload) for _, payload, _ in publications]


def instance_of(session: Session) -> bytes:
    presence = messages(session.connected())[0]
    assert isinstance(presence, Presence)
    return presence.instance


def test_every_connection_begins_with_presence_and_a_join(session: Session) -> None:
    instance = instance_of(session)
    for _ in range(2):
        assert list(session.connected()) == [
            (topics.here("kitchen"), encode(Presence(instance, True)), True),
            (topics.up("kitchen", instance.hex()), encode(Join(-1)), False),
        ]


def test_two_sessions_of_a_name_are_told_apart(shard: Path) -> None:
    assert len({instance_of(Session("kitchen", Member(shard))) for _ in range(20)}) == 20


def test_presence_is_said_again_to_every_server_that_starts_and_to_it_only(session: Session) -> None:
    server, presence = serve(), Presence(instance_of(session), True)
    for epoch in (b"epoch--1", b"epoch--2"):
        server.epoch = epoch
        assert messages(session.receive(topics.ALL, encode(server.announce())))[:1] == [presence]
        assert list(session.receive(topics.ALL, encode(server.announce()))) == []


def test_a_round_goes_over_the_sessions_topics(session: Session) -> None:
    server, down = serve(), topics.down("kitchen", instance_of(session).hex())
    said = list(session.receive(down, encode(server.welcome())))
    heard: list[Message] = []
    orders = [server.order()]
    while said:
        assert {topic for topic, _, _ in said} == {topics.up("kitchen", instance_of(session).hex())}
        heard += messages(said)
        answers = [answer for message in messages(said) for answer in server.take(message)]
        answers += [orders.pop()] if isinstance(heard[-1], Ready) else []
        said = [more for answer in answers for more in session.receive(down, encode(answer))]
        said = said or list(session.work())
    assert [type(message) for message in heard] == [Fetch, Ready, Fetch, Reply]


def test_a_join_that_nobody_answers_is_sent_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    said = messages(session.connected())[1:]
    for now in range(1000, 1010):
        monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
        said += messages(session.work())
    assert said == [Join(-1), Join(-1)]


def test_hooks_are_told_of_messages_after_they_were_sent(shard: Path) -> None:
    server, noted = serve(), list[object]()
    session = Session(
        "kitchen", Member(shard), lambda messages: noted.append(("received", *messages)),
        lambda messages: noted.append(("worked", *messages)),
    )  # fmt: skip
    fetch, ready = Fetch(server.run, PROGRAM, 0, 0), Ready(server.run, -1, 12)
    for message in (server.welcome(), server.chunk(fetch)):
        for _, payload, _ in session.receive("down", encode(message)):
            noted.append(decode(payload))
    assert list(session.work()) == []
    assert noted == [fetch, ("received", fetch), ready, ("received", ready), ("worked",)]


def test_a_cleared_announcement_is_no_message_and_anything_else_is(shard: Path) -> None:
    member = Member(shard)
    session = Session("kitchen", member)
    assert [*session.receive(topics.ALL, b""), *session.receive("elsewhere", b"")] == []
    assert member.refused == {"malformed": 1}


def test_the_will_and_the_last_message_tell_that_the_process_is_gone(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[NotedLink] = []
    monkeypatch.setattr(loop_module, "Link", lambda *args, **rest: links.append(NotedLink(*args, **rest)) or links[0])
    instance = instance_of(session)
    gone = (topics.here("kitchen"), encode(Presence(instance, False)))
    assert session.traffic == (0, 0)
    session.close()  # nothing to end yet
    session.connect(Loop(), broker("mqtt://localhost"), lambda line: None)
    assert session.traffic == (3, 4)
    session.close()
    (link,) = links
    assert link.client_id == f"kitchen-{instance.hex()}"
    assert link.subscriptions == [topics.ALL, topics.down("kitchen", instance.hex())]
    assert link.will == gone
    assert link.last == ((*gone, True),)

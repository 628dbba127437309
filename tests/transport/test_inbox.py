"""The server's inbox: what comes out is what went in, and no device can fill it."""

from __future__ import annotations

import queue

import pytest

from foreseed.transport.inbox import CONNECTED, Inbox
from foreseed.transport.topics import ALL, here, up


def drained(inbox: Inbox) -> list[object]:
    events = []
    while True:
        try:
            events.append(inbox.get(0.0)[1])
        except queue.Empty:
            return events


def test_events_come_out_in_their_order() -> None:
    inbox, said = Inbox(100), [(up("a", "00000000"), b"1"), (here("b"), b"2"), (ALL, b"3")]
    inbox.put(None, CONNECTED)
    for topic, payload in said:
        inbox.put_message(None, topic, payload)
    assert drained(inbox) == [CONNECTED, *said]
    assert not inbox.dropped


def test_long_messages_are_dropped_and_counted() -> None:
    inbox = Inbox(100)
    inbox.put_message(None, here("a"), bytes(100))
    inbox.put_message(None, here("a"), bytes(101))
    assert drained(inbox) == [(here("a"), bytes(100))]
    assert inbox.dropped == {"too long": 1}


def test_a_name_that_floods_fills_its_own_share_only() -> None:
    inbox = Inbox(100, max_waiting=32)
    for instance in range(10_000):
        inbox.put_message(None, up("flood", f"{instance:08x}"), b"x")
    inbox.put_message(None, here("quiet"), b"y")
    events = drained(inbox)
    assert events[-1] == (here("quiet"), b"y")
    assert len(events) == 33
    assert inbox.dropped == {"too many at once": 10_001 - len(events)}
    inbox.put_message(None, here("flood"), b"z")  # what has been handled makes room
    assert drained(inbox) == [(here("flood"), b"z")]


def test_waiting_for_an_event_ends_in_time() -> None:
    with pytest.raises(queue.Empty):
        Inbox(100).get(0.01)

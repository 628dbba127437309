"""What links hear, until the loop has time for it. A device loads this module."""

from __future__ import annotations

import threading
from _queue import Empty as Empty  # of `queue`, which would load 0.1 MB of others
from _queue import SimpleQueue
from collections import Counter
from math import inf

from foreseed.transport.topics import sender

TYPE_CHECKING = False
if TYPE_CHECKING:
    from foreseed.transport.link import LinkError
    from foreseed.transport.loop import Party

    Event = tuple[str, bytes] | LinkError | str

CONNECTED, STOP = "connected", "stop"
"""The events that are neither a message (topic, payload) nor the error that ended a link."""


class Inbox:
    """Messages and events in their order; a server bounds it, so that no device can fill its memory."""

    def __init__(self, max_bytes: float = inf, max_waiting: float = inf) -> None:
        """Drop messages that are longer than `max_bytes`, or whose sender has `max_waiting` here already."""
        self.dropped = Counter[str]()
        """By reason."""
        self._max_bytes, self._max_waiting = max_bytes, max_waiting
        self._events: SimpleQueue[tuple[Party | None, Event]] = SimpleQueue()
        self._waiting = Counter[str]()
        self._lock = threading.Lock()

    def put(self, party: Party | None, event: Event) -> None:
        """Add an event that is not a message."""
        self._events.put((party, event))

    def put_message(self, party: Party | None, topic: str, payload: bytes) -> None:
        """Add a message for a party, or drop it."""
        name, _ = sender(topic)
        with self._lock:
            if len(payload) > self._max_bytes:
                self.dropped["too long"] += 1
            elif self._waiting[name] >= self._max_waiting:
                self.dropped["too many at once"] += 1
            else:
                self._waiting[name] += 1
                self._events.put((party, (topic, payload)))

    def get(self, timeout: float) -> tuple[Party | None, Event]:
        """The next event and whom it is for; raises queue.Empty if there is none in time."""
        party, event = self._events.get(timeout=timeout)
        if isinstance(event, tuple):
            name, _ = sender(event[0])
            with self._lock:
                self._waiting[name] -= 1
                if not self._waiting[name]:
                    del self._waiting[name]
        return party, event

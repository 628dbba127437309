"""What the server's link hears, until the server has time for it: bounded, so that no device can fill its memory."""

from __future__ import annotations

import queue
import threading
from collections import Counter

from foreseed.transport.link import LinkError
from foreseed.transport.topics import sender

CONNECTED = None
"""The event of a new connection."""
_SHARE = 32
"""Messages of one name that may wait. A device waits for an answer to nearly everything that it says."""

Event = tuple[str, bytes] | LinkError | None


class Inbox:
    """Messages and events in their order; what is too long, or of a name that has its share here, is dropped."""

    def __init__(self, longest: int) -> None:
        self.dropped = Counter[str]()
        """By reason."""
        self._longest = longest
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._waiting = Counter[str]()
        self._lock = threading.Lock()

    def put(self, event: Event) -> None:
        """Add an event that is not a message."""
        self._events.put(event)

    def message(self, topic: str, payload: bytes) -> None:
        """Add a message, or drop it."""
        name, _ = sender(topic)
        with self._lock:
            if len(payload) > self._longest:
                self.dropped["too long"] += 1
            elif self._waiting[name] >= _SHARE:
                self.dropped["too many at once"] += 1
            else:
                self._waiting[name] += 1
                self._events.put((topic, payload))

    def get(self, timeout: float) -> Event:
        """The next event; raises queue.Empty if there is none in time."""
        event = self._events.get(timeout=timeout)
        if isinstance(event, tuple):
            name, _ = sender(event[0])
            with self._lock:
                self._waiting[name] -= 1
                if not self._waiting[name]:
                    del self._waiting[name]
        return event

"""The loop that drives sans-I/O parties over MQTT: a server, or devices by the hundred. A device loads this module.

A link's own thread only puts what happens into the inbox. Everything else is done by whoever calls the loop, in one
thread, so that parties need no locks.
"""

from __future__ import annotations

from foreseed.transport.inbox import CONNECTED, STOP, Empty, Inbox
from foreseed.transport.link import Link, LinkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol

    from foreseed.transport.link import Broker, Publication

    class Party(Protocol):
        """One side of the protocol. It does no I/O: what its methods return, or yield, is published in that order.

        A new connection knows nothing of the one before it, so `connected` says again what still matters. `receive` is
        quick. `work` does what takes time, then resends what timed out.
        """

        def connected(self) -> Iterable[Publication]: ...
        def receive(self, topic: str, payload: bytes) -> Iterable[Publication]: ...
        def work(self) -> Iterable[Publication]: ...


_TICK = 1.0
"""Seconds after which parties look at the clock again, if nothing happens."""


class Loop:
    """Carries messages between parties and their links."""

    def __init__(self, inbox: Inbox | None = None) -> None:
        self._inbox = inbox or Inbox()
        self._links: dict[Party, Link] = {}
        self._stopped = False

    def connect(
        self,
        party: Party,
        broker: Broker,
        client_id: str,
        subscriptions: list[str],
        say: Callable[[str], None],
        will: tuple[str, bytes] | None = None,
        quiet: float | None = None,
    ) -> Link:
        """Start a link for a party (see `Link`), for the caller to stop."""
        inbox = self._inbox
        link = self._links[party] = Link(
            broker, client_id, subscriptions, say=say, will=will, quiet=quiet,
            connected=lambda: inbox.put(party, CONNECTED),
            received=lambda topic, payload: inbox.put_message(party, topic, payload),
            failed=lambda error: inbox.put(party, error),
        )  # fmt: skip
        link.start()
        return link

    def run(self, done: Callable[[], bool] = lambda: False) -> None:
        """Drive the parties until `stop`, or until `done()`; raises LinkError if the broker refuses one for good."""
        while not self._stopped and not done():
            self.work()
            # All that has happened, so that an order that another one has replaced costs no work.
            is_delivered = self.deliver(_TICK)
            while is_delivered:
                is_delivered = self.deliver(0.0)

    def stop(self) -> None:
        """End `run` as soon as it has delivered what happened so far; from any thread, or from a signal handler."""
        self._inbox.put(None, STOP)

    def work(self) -> None:
        """Let every party work."""
        for party, link in self._links.items():
            _publish(link, party.work())

    def deliver(self, timeout: float) -> bool:
        """Hand the next event to its party; returns whether there was one in time, and no stop."""
        try:
            party, event = self._inbox.get(timeout)
        except Empty:
            return False
        if isinstance(event, LinkError):
            raise event
        if party is None:
            self._stopped = True
            return False
        _publish(self._links[party], party.connected() if isinstance(event, str) else party.receive(*event))
        return True


def _publish(link: Link, messages: Iterable[Publication]) -> None:
    for message in messages:
        link.publish(*message)

"""A broker inside this process, for trials on one machine; a fleet deserves a real one."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from typing import Any

from foreseed.transport.link import LinkError

_TIMEOUT = 10.0
"""Seconds that the broker gets to start, and to end."""


class EmbeddedBroker:
    """An MQTT broker on the loopback that lets anybody in; use it as a context manager."""

    def __init__(self, port: int = 0) -> None:
        """Start it on this port, or on a free one."""
        self._port: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(port,), name="embedded broker", daemon=True)
        self._thread.start()
        try:
            self.url = f"mqtt://127.0.0.1:{self._port.result(_TIMEOUT)}"
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise LinkError(f"embedded broker: port {port} cannot be had ({why}); choose another, or 0") from None

    def close(self) -> None:
        """End the broker: every client loses it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_TIMEOUT)

    def __enter__(self) -> EmbeddedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, port: int) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(port))

    async def _serve(self, port: int) -> None:
        clients: dict[asyncio.Future[None], asyncio.StreamWriter] = {}
        try:
            broker, handle = _broker()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                client = asyncio.ensure_future(handle(reader, writer))
                clients[client] = writer
                client.add_done_callback(lambda ended: _close_client(ended, clients.pop(ended)))

            # The broker's own listener would not tell the port that it found free.
            server = await asyncio.start_server(accept, "127.0.0.1", port)
            await broker.start()
        except Exception as error:  # whatever it is, it belongs to whoever started the broker
            return self._port.set_exception(error)
        self._port.set_result(server.sockets[0].getsockname()[1])
        await self._end.wait()
        # No new clients; one that has just been accepted comes to `accept` after some turns of the loop, and would be
        # left over by a server that is closed before.
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        for _ in range(5):
            await asyncio.sleep(0)
        server.close()
        await broker.shutdown()
        left = dict(clients)
        for client in left:
            client.cancel()
        await asyncio.gather(*left, *(writer.wait_closed() for writer in left.values()), return_exceptions=True)


def _close_client(ended: asyncio.Future[None], writer: asyncio.StreamWriter) -> None:
    writer.close()  # which the broker forgets for one who hangs up without a word
    if not ended.cancelled():
        ended.exception()  # a client's misbehaviour is nobody's business: unread, it would be printed


def _broker() -> tuple[Any, Any]:
    """A broker that is not started yet, and what attends to a client as long as it is there."""
    try:
        from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter  # type: ignore[import-untyped]
        from amqtt.broker import Broker  # type: ignore[import-untyped]
    except ImportError:
        raise LinkError("the embedded broker needs amqtt: pip install amqtt, or name a broker: mqtts://host") from None
    # It would tell of every client that goes away.
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)

    class RetainedOnce(Broker):  # type: ignore[misc]
        async def _publish_retained_messages_for_subscription(self, subscription: Any, session: Any) -> None:
            # The base calls this, with QoS 0, for every subscription of anybody when a client connects: the client
            # would get what it never asked for, or lose its connection if somebody subscribes meanwhile. With QoS 1
            # it is the client's own subscription.
            if subscription[1] > 0:
                await super()._publish_retained_messages_for_subscription(subscription, session)

    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    broker = RetainedOnce({"listeners": {"default": {"type": "external"}}, "plugins": plugins})

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await broker.external_connected(StreamReaderAdapter(reader), StreamWriterAdapter(writer), "default")

    return broker, handle

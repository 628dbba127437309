"""A fleet of real devices, behind MQTT: a thin driver around the coordinator's side of the protocol."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from foreseed.config import Config, ConfigError
from foreseed.engine import ForeseedError
from foreseed.engine.files import write_whole
from foreseed.methods.ntk_baffle import run_id
from foreseed.serve.conductor import Conductor, Device, Send
from foreseed.server import Coordinator
from foreseed.simulate.fleet import Fleet
from foreseed.simulate.world import World
from foreseed.transport.inbox import CONNECTED, Inbox
from foreseed.transport.link import Broker, Link, LinkError
from foreseed.transport.topics import ALL, EVERY_HERE, EVERY_UP, down, sender
from foreseed.wire import Announce, OrderMessage, Reply, WireError, decode, encode

_STEP = 0.05
"""Seconds between looks at the clock while nothing arrives."""
_FRAME = 512
"""Bytes of a message beyond its vectors, at most."""
_ECHO = 5.0
"""Seconds for our own announcement to come back from the broker."""
_SILENCE = 30.0
"""Seconds after which a round without a single answer is looked into."""
_GOODBYE = 10.0
"""Seconds to find the broker in, when all that is left to say is that the run is over."""

_Numbers = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]])

Table = Mapping[str, Device]


def check(config: Config) -> None:
    """Refuse an experiment that a real fleet cannot run."""
    if config.is_bp:
        raise ConfigError(f"method {config.method} backpropagates, which devices cannot; expected ntk-baffle or baffle")
    if config.engine != "difference":
        raise ConfigError(f'engine "{config.engine}" is a simulation; real devices take engine = "difference"')
    if config.fleet.min_replies > config.data.per_round:
        raise ConfigError(
            f"fleet.min_replies {config.fleet.min_replies} never come of data.per_round {config.data.per_round} devices"
        )


class ServedFleet(Fleet):
    """Holds the rounds of a run with the devices that a broker reaches."""

    def __init__(
        self,
        world: World,
        folder: Path,
        broker: Broker,
        say: Callable[[str], None],
        watch: Callable[[Table], None] | None = None,
    ) -> None:
        super().__init__(world)
        self._broker, self._say, self._watch = broker, say, watch
        self._enrolled = folder / "checkpoint" / "devices.json"
        self._epoch = secrets.token_bytes(8)
        config, program = world.config, world.program
        longest = 4 * (1 + config.train.k * config.train.local_steps + program.n_stats) + _FRAME
        self._inbox = Inbox(longest)
        self._link: Link | None = None
        self._conductor: Conductor | None = None
        self._counted: dict[str, tuple[int, int]] = {}
        self._traffic = {"bytes_up": 0, "bytes_down": 0}
        self._asked_at: float | None = None
        """When the round's first order went out."""
        self._silent_at = self._deaf_at = inf
        """When to wonder about a round without an answer, and about a broker that does not repeat our announcement."""
        self._rivals = set[bytes]()
        """Runs of other servers at this broker."""
        self._late = 0
        """Rounds that closed at their deadline with some answers missing."""
        self._looked = 0.0
        self._stopped = False
        # Raised wherever the server happens to be, an interrupt may be swallowed or become another error.
        self._handlers = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM)
            if threading.current_thread() is threading.main_thread()
        }

    def hold_round(self, coordinator: Coordinator) -> dict[str, Any]:
        conductor = self._conductor or self._start(coordinator)
        self._asked_at, refused = None, conductor.refused + self._inbox.dropped
        conductor.open(time.monotonic())
        while not conductor.complete:
            if self._stopped:
                raise KeyboardInterrupt
            self._send(conductor.tick(time.monotonic()))
            self._look(conductor)
            self._take(conductor)
            self._wonder(coordinator)
        self._say_if_late(coordinator)
        replies, traffic = coordinator.replies, self._traffic
        self._traffic = {"bytes_up": 0, "bytes_down": 0}
        assert self._asked_at is not None
        waited = 1000 * (time.monotonic() - self._asked_at)
        return traffic | self._wire(replies) | {
            "round_overhead_ms": waited - min(waited, max(reply.compute_ms for reply in replies)),
            "refused": dict(conductor.refused + self._inbox.dropped - refused),
            "peaks_kib": [reply.peak_kib for reply in replies],
        }  # fmt: skip

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Tell the devices that the run is over; what they held and sent goes into the summary."""
        link, self._link = self._link, None
        if link is None:
            found = threading.Event()
            link = self._connect(found.set)
            found.wait(_GOODBYE)
        link.stop((ALL, encode(Announce(run_id(self.world.config), self._epoch, True)), True))
        # A server that was killed counted too, but a run may have begun in the simulator.
        served = [row for row in rows if "wire_up" in row]
        return {"fleet": self._costs(served)} if served else {}

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._link is not None:
            self._link.stop()
            self._link = None
        super().close()

    def _start(self, coordinator: Coordinator) -> Conductor:
        config, program = self.world.config, self.world.program
        batch = config.train.batch if program.n_stats else 0
        self._conductor = Conductor(
            coordinator, config.fleet, program.bytes, batch, self._epoch, self._numbers(), self._store
        )
        self._link = self._connect(lambda: self._inbox.put(CONNECTED))
        return self._conductor

    def _connect(self, connected: Callable[[], None]) -> Link:
        # Nobody else may know it: a client that connects with the same id throws this one out.
        client = f"foreseed-{secrets.token_hex(8)}"
        link = Link(
            self._broker, client, [ALL, EVERY_UP, EVERY_HERE], connected=connected, say=self._say,
            received=self._inbox.message, gave_up=self._inbox.put,
        )  # fmt: skip
        link.start()
        return link

    def _take(self, conductor: Conductor) -> None:
        """Handle what arrived next; waits a moment if nothing has."""
        try:
            event = self._inbox.get(_STEP)
        except queue.Empty:
            return
        if isinstance(event, LinkError):
            raise event
        now = time.monotonic()
        if event is CONNECTED:
            assert self._link is not None
            self._epoch, self._deaf_at = secrets.token_bytes(8), now + _ECHO
            conductor.reconnected(self._epoch)
            self._link.publish(ALL, encode(conductor.announce), retain=True)
            return
        topic, payload = event
        if topic == ALL:
            self._overhear(payload)
            return
        self._traffic["bytes_up"] += len(payload)
        name, instance = sender(topic)
        self._send(
            conductor.receive(name, instance, payload, now) if instance else conductor.presence(name, payload, now)
        )

    def _overhear(self, payload: bytes) -> None:
        """Our own announcement comes back; that of another server means trouble."""
        try:
            announce = decode(payload, Announce)
        except WireError:
            return
        assert isinstance(announce, Announce)
        if announce.epoch == self._epoch:
            self._deaf_at = inf
        elif announce.run != run_id(self.world.config) and not announce.finished and announce.run not in self._rivals:
            self._rivals.add(announce.run)
            self._say(
                f"run {announce.run.hex()} is announced at this broker too; if its server is still there, stop one of "
                "the two: they take each other's devices"
            )

    def _wonder(self, coordinator: Coordinator) -> None:
        """Look into a silence that lasts."""
        now = time.monotonic()
        if now > self._deaf_at:
            self._deaf_at = inf
            self._say("the broker drops what this server says; check its credentials and the broker's ACL")
        if now > self._silent_at and not coordinator.replies:
            # At values that have grown too large no device can answer. The test images show that too: this raises.
            self._silent_at = inf
            self.evaluate(coordinator.state.values, coordinator.state.stats)

    def _say_if_late(self, coordinator: Coordinator) -> None:
        if not coordinator.missing:
            return
        self._late += 1
        if self._late & (self._late - 1) == 0:  # the first time, the second, the fourth, ...
            wanted = self.world.config.data.per_round
            self._say(
                f"round {coordinator.round}: {wanted - coordinator.missing} of {wanted} answers within "
                f"{self.world.config.fleet.deadline:g} s ({self._late} such rounds so far); raise fleet.deadline if "
                "devices are slow"
            )

    def _send(self, sends: Sequence[Send]) -> None:
        assert self._link is not None
        for name, instance, message in sends:
            if isinstance(message, OrderMessage) and self._asked_at is None:
                self._asked_at = time.monotonic()
                self._silent_at = self._asked_at + _SILENCE
            data = encode(message)
            self._traffic["bytes_down"] += len(data)
            self._link.publish(down(name, instance), data)

    def _look(self, conductor: Conductor) -> None:
        if self._watch is not None and time.monotonic() - self._looked > 0.25:
            self._looked = time.monotonic()
            self._watch(conductor.devices)

    def _wire(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Bytes on the devices' sockets since each one's last reply; a device that started anew counts from 0."""
        assert self._conductor is not None
        wire = []
        instances = {device.number: device.instance for device in self._conductor.devices.values()}
        for reply in replies:
            key = f"{reply.device}/{instances.get(reply.device)}"
            sent, received = self._counted.get(key, (0, 0))
            wire.append((max(reply.sent - sent, 0), max(reply.received - received, 0)))
            self._counted[key] = (reply.sent, reply.received)
        return {"wire_up": sum(up for up, _ in wire), "wire_down": sum(down for _, down in wire), "wire": wire}

    def _costs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names, peaks = {number: name for name, number in self._numbers().items()}, dict[str, int]()
        for row in rows:
            for number, peak in zip(row["participants"], row["peaks_kib"], strict=True):
                peaks[names[number]] = max(peak, peaks.get(names[number], 0))
        return {
            "devices": len(names),
            "device_peak_mb": max(peaks.values()) * 1024 / 1e6,
            "device_peaks_kib": peaks,
            "refused": dict(sum((Counter(row["refused"]) for row in rows), Counter[str]())),
            "wire_up_bytes": sum(row["wire_up"] for row in rows),
            "wire_down_bytes": sum(row["wire_down"] for row in rows),
            "payload_up_bytes": sum(row["bytes_up"] for row in rows),
            "payload_down_bytes": sum(row["bytes_down"] for row in rows),
            "round_overhead_ms": statistics.median_high(row["round_overhead_ms"] for row in rows),
        }

    def _numbers(self) -> dict[str, int]:
        try:
            return _Numbers.validate_json(self._enrolled.read_bytes(), strict=True)
        except FileNotFoundError:
            return {}
        except ValidationError:
            raise ForeseedError(
                f"{self._enrolled} is damaged: it holds which device has which number; put it right, or start anew"
            ) from None

    def _store(self, numbers: Mapping[str, int]) -> None:
        os.makedirs(self._enrolled.parent, exist_ok=True)
        write_whole(self._enrolled, json.dumps(numbers, indent=1).encode())

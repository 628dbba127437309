"""A fleet of real devices, behind MQTT: a thin driver around the coordinator's side of the protocol."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from foreseed.config import Config, ConfigError, methods
from foreseed.coordinator import Coordinator
from foreseed.engine import Program
from foreseed.fleet.conductor import Conductor, Device, Send
from foreseed.fleet.costs import fleet_costs
from foreseed.fleet.enrolment import agreed, store_numbers, stored_numbers
from foreseed.fleet.real import RealDevices
from foreseed.fleet.status import StatusFile
from foreseed.methods.ntk_baffle import run_id
from foreseed.methods.protocol import Traffic
from foreseed.methods.task import Task
from foreseed.runs import Change, Lease, changes_of, times_gone_back
from foreseed.transport.inbox import Inbox
from foreseed.transport.link import Broker, Link, Publication
from foreseed.transport.loop import Loop
from foreseed.transport.topics import ALL, EVERY_HERE, EVERY_UP, down, sender
from foreseed.wire import Announce, OrderMessage, Reply, WireError, decode, encode

_POLL = 0.05
"""Seconds between looks at the clock while nothing arrives."""
_OVERHEAD = 512
"""Bytes of a message beyond its vectors, at most."""
_MAX_WAITING = 32
"""Messages of one name that may wait. A device waits for an answer to nearly everything that it says."""
_ECHO_TIMEOUT = 5.0
"""Seconds for our own announcement to come back from the broker."""
_SILENCE_TIMEOUT = 30.0
"""Seconds after which a round without a single answer is looked into."""
_WAIT = 30.0
"""Seconds of a round after which the user is told whom it waits for; then after twice as many, and so on."""
_FINISH_TIMEOUT = 10.0
"""Seconds to find the broker in, when all that is left to say is that the run is over."""

Table = Mapping[str, Device]


def check(config: Config) -> None:
    """Refuse an experiment that a real fleet cannot run."""
    if config.is_bp:
        raise ConfigError(f"method {config.method} backpropagates, which devices cannot; expected ntk-baffle or baffle")
    if only_simulated := methods()[config.method].only_simulated:
        raise ConfigError(f"method {config.method} is a simulation: {only_simulated}; expected ntk-baffle or baffle")
    if config.engine != "difference":
        raise ConfigError(f'engine "{config.engine}" is a simulation; real devices take engine = "difference"')
    if config.fleet.min_replies > config.data.per_round:
        raise ConfigError(
            f"fleet.min_replies {config.fleet.min_replies} never come of data.per_round {config.data.per_round} devices"
        )


class FleetDevices(RealDevices):
    """The devices that a broker reaches."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        broker: Broker,
        say: Callable[[str], None],
        lease: Lease,
        watch: Callable[[Table], None] | None = None,
        names: Mapping[str, int] | None = None,
    ) -> None:
        """`lease` is that of the folder; `names` are those of an enrolment: nobody else takes part then."""
        super().__init__(task)
        self._names = names
        self._broker, self._say, self._watch = broker, say, watch
        self._folder, self._lease, self._connections = folder, lease, 0
        config, program = task.config, task.program
        longest = 4 * (1 + config.train.k * config.train.local_steps + program.n_stats) + _OVERHEAD
        self._inbox = Inbox(longest, _MAX_WAITING)
        self._loop = Loop(self._inbox)
        self._link: Link | None = None
        self._conductor: Conductor | None = None
        self._traffic = {"bytes_up": 0, "bytes_down": 0}
        self._silence_deadline = self._echo_deadline = inf
        """When to look into a round without an answer, and into a broker that does not repeat our announcement."""
        self._other_runs = set[bytes]()
        """Runs of other servers at this broker that were told, and what this run was called before it changed."""
        self._status, self._over = StatusFile(folder, config.run_name, config.rounds), False
        self._late_rounds = 0
        """Rounds that closed at their deadline with some answers missing."""
        self._refreshed = 0.0
        self._stopped = False
        # Raised wherever the server happens to be, an interrupt may be swallowed or become another error.
        self._handlers = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM)
            if threading.current_thread() is threading.main_thread()
        }

    def ask(self, coordinator: Coordinator, program: Program) -> Traffic:
        self._check_program(program)
        conductor = self._conductor or self._start(coordinator)
        self._asked_at, refused = None, conductor.refused + self._inbox.dropped
        conductor.open(time.monotonic())
        word_due, wait = time.monotonic() + _WAIT, _WAIT
        while not conductor.complete:
            if self._stopped:
                raise KeyboardInterrupt
            self._lease.check_known()
            self._loop.work()
            self._refresh_watch(conductor)
            self._status.write(conductor, self._inbox.dropped, time.monotonic())
            self._loop.deliver(_POLL)
            self._check_silence(coordinator)
            if time.monotonic() > word_due:
                self._say(conductor.waiting_for(time.monotonic()))
                self._announce(conductor)
                word_due, wait = time.monotonic() + wait, 2 * wait
        if conductor.late:
            self._report_late(coordinator)
        replies, traffic = coordinator.replies, self._traffic
        self._traffic = {"bytes_up": 0, "bytes_down": 0}
        new_refused = dict(conductor.refused + self._inbox.dropped - refused)
        measured = self._measured(replies) | _wire(replies) | {"refused": new_refused}
        return Traffic(traffic["bytes_up"], traffic["bytes_down"], measured)

    def costs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Tell the devices that the run is over; what they held and sent goes into the summary."""
        self._lease.check()
        link, self._link, self._over = self._link, None, True
        if link is None:
            link, end = self._connect(), time.monotonic() + _FINISH_TIMEOUT
            while not link.is_connected and time.monotonic() < end:
                time.sleep(_POLL)
        link.stop((ALL, encode(Announce(self._run, self._epoch, True)), True))
        return fleet_costs(rows, stored_numbers(self._folder))

    @property
    def _epoch(self) -> bytes:
        """The lease's fence, and 2 bytes that count our connections."""
        return self._lease.fence + (self._connections % 65536).to_bytes(2, "big")

    @cached_property
    def _run(self) -> bytes:
        return run_id(self.task.config, times_gone_back(self._folder))

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._conductor is not None and not self._lease.is_lost:
            self._status.end(self._conductor, self._inbox.dropped, self._over)
        if self._link is not None:
            self._link.stop()
            self._link = None
        self._workers.close()

    def _start(self, coordinator: Coordinator) -> Conductor:
        config, program = self.task.config, self.task.program
        batch = config.train.batch if program.n_stats else 0
        numbers = stored_numbers(self._folder)
        if self._names is not None:
            numbers = agreed(self._names, numbers, config.data.devices)
            self._store(numbers)
        coordinator.rules = replace(coordinator.rules, run=self._run)
        self._other_runs |= _earlier_runs(config, changes_of(self._folder))
        self._conductor = Conductor(
            coordinator, config.fleet, program.bytes, batch, self._epoch, numbers, self._store,
            closed=self._names is not None, say=self._say,
        )  # fmt: skip
        self._link = self._connect()
        return self._conductor

    def _connect(self) -> Link:
        # Nobody else may know it: a client that connects with the same id throws this one out.
        client_id = f"foreseed-{secrets.token_hex(8)}"
        return self._loop.connect(self, self._broker, client_id, [ALL, EVERY_UP, EVERY_HERE], self._say)

    def connected(self) -> list[Publication]:
        assert self._conductor is not None
        self._connections, self._echo_deadline = self._connections + 1, time.monotonic() + _ECHO_TIMEOUT
        self._conductor.reconnected(self._epoch)
        return [(ALL, encode(self._conductor.announce), True)]

    def receive(self, topic: str, payload: bytes) -> list[Publication]:
        assert self._conductor is not None
        if topic == ALL:
            return self._check_announcement(payload)
        self._traffic["bytes_up"] += len(payload)
        (name, instance), now = sender(topic), time.monotonic()
        if instance:
            known = len(self._conductor.not_understood)
            sends = self._conductor.receive(name, instance, payload, now)
            if len(self._conductor.not_understood) > known:
                self._report_other_version(name, known + 1)
            return self._publications(sends)
        return self._publications(self._conductor.presence(name, payload, now))

    def work(self) -> list[Publication]:
        assert self._conductor is not None
        return self._publications(self._conductor.tick(time.monotonic()))

    def _announce(self, conductor: Conductor) -> None:
        """Say again who serves: in a cluster, a device may have missed it although its own node lives."""
        assert self._link is not None
        self._link.publish(ALL, encode(conductor.announce), True)

    def _check_announcement(self, payload: bytes) -> list[Publication]:
        """Our own announcement comes back; that of another server means trouble."""
        assert self._conductor is not None
        try:
            announce = decode(payload, Announce)
        except WireError:
            return []
        assert isinstance(announce, Announce)
        lineage, fence = announce.epoch[:4], announce.epoch[:6]
        if announce.epoch == self._epoch:
            self._echo_deadline = inf
        elif lineage == self._lease.lineage:
            if fence > self._lease.fence:
                self._lease.lose()
            elif fence < self._lease.fence:
                # One that was paused has woken up; who connects now should not hear of it first.
                return [(ALL, encode(self._conductor.announce), True)]
        elif not announce.finished and announce.run not in {self._run} | self._other_runs:
            self._other_runs.add(announce.run)
            self._say(
                f"run {announce.run.hex()} is announced at this broker too; if its server is still there, stop one of "
                "the two: they take each other's devices"
            )
        return []

    def _check_silence(self, coordinator: Coordinator) -> None:
        """Look into a silence that lasts."""
        now = time.monotonic()
        if now > self._echo_deadline:
            self._echo_deadline = inf
            self._say("the broker drops what this server says; check its credentials and the broker's ACL")
        if now > self._silence_deadline and not coordinator.replies:
            # At values that have grown too large no device can answer. The test images show that too: this raises.
            self._silence_deadline = inf
            self.evaluate(self.task.program, coordinator.state.values, coordinator.state.stats)

    def _report_late(self, coordinator: Coordinator) -> None:
        self._late_rounds += 1
        if self._late_rounds & (self._late_rounds - 1) == 0:  # the first time, the second, the fourth, ...
            wanted = self.task.config.data.per_round
            self._say(
                f"round {coordinator.round}: {wanted - coordinator.missing} of {wanted} answers within "
                f"{self.task.config.fleet.deadline:g} s ({self._late_rounds} such rounds so far); "
                "raise fleet.deadline if devices are slow"
            )

    def _report_other_version(self, name: str, count: int) -> None:
        assert self._conductor is not None
        if count & (count - 1) == 0:  # the first device, the second, the fourth, ...
            self._say(
                f"device {name} cannot be understood: {self._conductor.not_understood[name]}; install the same "
                f"foreseed here and there ({count} such devices so far)"
            )

    def _publications(self, sends: Sequence[Send]) -> list[Publication]:
        publications = []
        for name, instance, message in sends:
            self._status.note(name, message)
            if isinstance(message, OrderMessage) and self._asked_at is None:
                self._asked_at = time.monotonic()
                self._silence_deadline = self._asked_at + _SILENCE_TIMEOUT
            data = encode(message)
            self._traffic["bytes_down"] += len(data)
            publications.append((down(name, instance), data, False))
        return publications

    def _refresh_watch(self, conductor: Conductor) -> None:
        if self._watch is not None and time.monotonic() - self._refreshed > 0.25:
            self._refreshed = time.monotonic()
            self._watch(conductor.devices)

    def _store(self, numbers: Mapping[str, int]) -> None:
        store_numbers(self._folder, numbers, self._lease)


def _wire(replies: Sequence[Reply]) -> dict[str, Any]:
    """Bytes on the devices' sockets since each one's last reply that counted."""
    wire = [(reply.sent, reply.received) for reply in replies]
    return {"wire_up": sum(up for up, _ in wire), "wire_down": sum(down for _, down in wire), "wire": wire}


def _earlier_runs(config: Config, changes: Sequence[Change]) -> set[bytes]:
    """What a run was called before each of its changes: the broker may still have that announcement."""
    earlier, back = set(), sum(change.went_back_from is not None for change in changes)
    for change in reversed(changes):
        config = config.with_({key: before for key, (before, _) in change.settings.items()})
        back -= change.went_back_from is not None
        earlier.add(run_id(config, back))
    return earlier

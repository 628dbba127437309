"""The conductor: who takes part in a real fleet's run, and how its rounds are held under faults. It does no I/O.

It stands between the coordinator and a transport: bytes that came from devices go in, messages for devices come out,
and time is an argument. A round, as its owner sees it: `open`, then `receive`, `presence` and `tick` until `complete`,
then the coordinator's `close`. Whatever bytes arrive, the values change in `close` alone.

How a round goes with `sample = "present"`:

- It starts when per_round + extra devices are ready (those that rest are not waited for), or after `gather` seconds
  when min_replies are.
- From then on one rule replaces devices: whenever the replies so far and the devices still at work together fall short
  of per_round, others that are ready are asked in their place, at once. At work is who was asked, has not left, and has
  not run out of time.
- It is complete with per_round replies; with min_replies or more at the deadline; or with as many as soon as nobody is
  at work, since nothing more would come. A deadline with fewer replies sets another one.
- Who was asked and left, or ran out of time, failed unless it answers before the round closes. After rest_after
  failures in a row a device rests for rest_rounds rounds, for twice as many if it fails again right after, and so on up
  to 16 times as many. Where fewer than min_replies devices could answer otherwise, resting ones are asked too.
- A device whose answer is refused for what it says is told why, is no longer at work, and rests from the next round on.

With `sample = "all"` the coordinator's own sample is asked, whoever is there, and waited for without a deadline, so the
run is the simulator's to the bit; a device whose answer is refused is not waited for.

Who has which number: names that were enrolled beforehand have theirs, and with them nobody else takes part. Otherwise a
number belongs to the first device that is ready under it; one that joined without asking for a number, and has not
answered yet, gives way to one that asks for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from foreseed.config.schema import Fleet
from foreseed.coordinator import Coordinator
from foreseed.coordinator.sampling import sample
from foreseed.wire import (
    ANY_NUMBER,
    CHUNK,
    NOTHING_HELD,
    PROGRAM,
    STATE,
    Ack,
    Announce,
    Chunk,
    Fetch,
    Join,
    Leave,
    Message,
    OrderMessage,
    Presence,
    Ready,
    Reply,
    VersionError,
    Welcome,
    WireError,
    decode,
    encode,
    is_name,
    program_hash,
)

DeviceState = Literal["joining", "ready", "asked", "answered", "refused", "resting", "gone"]

_INSTANCE = re.compile(r"[0-9a-f]{8}")
_MAX_DOUBLINGS = 4
"""Of a rest, at most."""
_FIRST_NUDGE, _LOOK_EVERY = 30.0, 1.0
"""Seconds of silence until a device is welcomed again, twice as many each time; and between looks at who is silent."""
_MOST_NAMED = 5
"""Devices that are named where a round waits for more."""


class Send(NamedTuple):
    """A message for one process of a device: it goes to foreseed/1/d/NAME/down/INSTANCE."""

    name: str
    instance: str
    message: Message


@dataclass
class Device:
    """What the server knows of an enrolled device."""

    name: str
    number: int
    states: Counter[str] = field(repr=False)
    """How many devices are in each state; this one counts unless it is gone."""
    instance: str = ""
    """The process that stands for the device; none has joined yet if empty."""
    last_seen: float | None = None
    held: int = NOTHING_HELD
    """The round whose values it holds."""
    samples: int = 0
    peak_kib: int = 0
    sent: int = 0
    """Bytes on its socket, up and, as `received`, down, by its answers that counted since this server started."""
    received: int = 0
    answered: int | None = None
    """The last round in which an answer of its process counted."""
    payload_up: int = 0
    """Bytes of its messages, and, as `payload_down`, of those sent to it."""
    payload_down: int = 0
    failures: int = 0
    """In a row, up to now."""
    rests_until: int = 0
    """The round in which it may be asked again."""
    asked_at: float | None = None
    due: float = inf
    """When its answer should be here, once it is asked."""
    nudges: int = 0
    """How often it was welcomed again since it said something last."""
    enrolled: bool = False
    """Whether its number is its own, as from the first time that it is ready."""
    movable: bool = False
    """Whether it gives way to a device that asks for its number: it took any, and has not answered yet."""
    refused: int = 0
    """Answers that were refused for what they said."""
    _state: DeviceState = "gone"

    @property
    def state(self) -> DeviceState:
        return self._state

    @state.setter
    def state(self, state: DeviceState) -> None:
        self.states[self._state] -= self._state != "gone"
        self.states[state] += state != "gone"
        self._state = state


class Conductor:
    """The server's side of a fleet, one call at a time."""

    def __init__(
        self,
        coordinator: Coordinator,
        rules: Fleet,
        program: bytes,
        batch: int,
        epoch: bytes,
        numbers: dict[str, int],
        enrolled: Callable[[dict[str, int]], None],
        *,
        closed: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Go on with the run where the coordinator stands.

        `batch` is the program's BatchNorm batch (0 without). `epoch` is drawn anew at each start of a server.
        `numbers` are the names enrolled so far. `enrolled` gets them with every new one, to store before it returns:
        the number of a device that was ready once is given to nobody else. `closed`: no other names take part. `say`
        takes a line for the user.
        """
        self.coordinator, self.rules = coordinator, rules
        self.finished = False
        self.refused: Counter[str] = coordinator.refused
        """What arrived and changed nothing, by reason."""
        self.late = False
        """Whether the round closed at its deadline, with answers missing."""
        self.not_understood: dict[str, str] = {}
        """Names that send messages of another version, and what is wrong with them."""
        self.states = Counter[str]()
        """How many devices are ready, resting and so on: a round looks at it with every message."""
        self.devices = {name: Device(name, number, self.states, enrolled=True) for name, number in numbers.items()}
        self._by_number = {device.number: device for device in self.devices.values()}
        self._program, self._program_hash = program, program_hash(program)
        self._batch, self._epoch, self._enrolled = batch, epoch, enrolled
        self._closed, self._say = closed, say
        self._state = (-1, b"")
        self._timeout = rules.deadline or inf
        self._round = 0
        self._opened = 0.0
        self._started = self._ended = False
        self._deadline = inf
        self._resting = 0
        self._failed: set[int] = set()
        self._nudged_at = 0.0
        self._last_present: float = inf
        """Devices that were here when the last round started: waiting for more than these is waiting in vain."""

    @property
    def announce(self) -> Announce:
        """What devices are told of the run before they join it."""
        return Announce(self.coordinator.rules.run, self._epoch, self.finished)

    @property
    def complete(self) -> bool:
        """Whether the round can be closed."""
        return self._is_open and self._started and (self._ended or not self.coordinator.missing)

    def reconnected(self, epoch: bytes) -> None:
        """Take it that everything said meanwhile is lost: with another epoch all devices join again.

        Until then nobody knows who is still here. Devices at work keep the time that they have.
        """
        self._epoch = epoch
        for device in self.devices.values():
            if device.state != "asked":
                device.state = "gone"

    def open(self, now: float) -> None:
        """Begin the next round; its orders go out with `tick`, when enough devices are here."""
        self._round = self.coordinator.round
        for number in self._failed:
            self._count_failure(self._by_number[number])
        self._failed = set()
        self._opened, self._deadline = now, inf
        self._started = self._ended = self.late = False
        self._resting = sum(device.rests_until > self._round for device in self.devices.values())
        for device in self.devices.values():
            device.asked_at, device.due = None, inf
            if device.state not in ("joining", "gone"):
                device.state = self._idle_state(device)

    def receive(self, name: str, instance: str, data: bytes, now: float) -> list[Send]:
        """Take a message of a device's process; returns what to send, to it and to others."""
        try:
            message = decode(data, Join, Ready, Fetch, Reply)
        except VersionError as error:
            if is_name(name):
                self.not_understood.setdefault(name, str(error))
            return self._refuse("other version")
        except WireError:
            return self._refuse("malformed")
        if not is_name(name) or not _INSTANCE.fullmatch(instance):
            return self._refuse("malformed name")
        if isinstance(message, Join):
            sends = self._on_join(name, instance, message.wanted)
        else:
            sends = self._dispatch(name, instance, message, now)
        device = self.devices.get(name)
        if device is not None and device.instance == instance:
            device.last_seen, device.nudges = now, 0
            device.payload_up += len(data)
        return sends + self.tick(now)

    def presence(self, name: str, data: bytes, now: float) -> list[Send]:
        """Take the word that a device's process is here, or gone; returns what to send."""
        try:
            message = decode(data, Presence)
        except VersionError:
            # It may have been retained of a process that is long gone; one that is here joins too.
            return self._refuse("other version")
        except WireError:
            return self._refuse("malformed")
        device, sends = self.devices.get(name), list[Send]()
        # Others are here before they join, or leave after another process took their place: both are as it should be.
        if device is not None and isinstance(message, Presence) and message.instance.hex() == device.instance:
            device.payload_up += len(data)
            if not message.here:
                self._mark_gone(device)
                # In a cluster, the will of a connection that broke may come after the device's next one is here.
                if device.enrolled:
                    sends.append(self._send_to(device, self._welcome(device)))
                else:
                    self._forget(device)
            elif device.state == "gone":
                device.state, device.last_seen = "joining", now
        return sends + self.tick(now)

    def tick(self, now: float) -> list[Send]:
        """Let time pass: start the round, replace devices that will not answer, or end it at its deadline."""
        if not self._is_open or self.complete:
            return []
        return self._nudge(now) + self._hold_round(now)

    def _hold_round(self, now: float) -> list[Send]:
        if not self._started:
            return self._start(now)
        if self.rules.sample == "all":
            # Only refused answers leave nobody to wait for while some are missing.
            if self.coordinator.waiting:
                return []
            self._ended = bool(self.coordinator.replies)
            return [] if self._ended else self._ask_again(now)
        waiting = [self._by_number[number] for number in self.coordinator.waiting]
        at_work = sum(device.state == "asked" and device.due > now for device in waiting)
        replies = self.coordinator.rules.per_round - self.coordinator.missing
        if now >= self._deadline:
            self._failed |= {device.number for device in waiting if device.due <= now}
            self._deadline = now + self._timeout
            self._ended = self.late = replies >= self.rules.min_replies
            if not self._ended:
                self._forgive()
        sends = [] if self._ended else self._ask_others(replies + at_work, now)
        self._ended = self._ended or (replies >= self.rules.min_replies and not at_work and not sends)
        return sends

    def _nudge(self, now: float) -> list[Send]:
        """Welcome silent devices again: one that missed an order, or whose word was lost, says that it is ready."""
        if now < self._nudged_at + _LOOK_EVERY:
            return []
        self._nudged_at, sends, waiting = now, list[Send](), self.coordinator.waiting
        for device in self.devices.values():
            is_awaited = device.state in ("joining", "asked") or device.number in waiting
            if not device.instance or not is_awaited:
                continue
            since = max(device.last_seen or self._opened, device.asked_at or 0.0)
            if now >= since + _FIRST_NUDGE * (2 ** (device.nudges + 1) - 1):
                device.nudges += 1
                sends.append(self._send_to(device, self._welcome(device)))
        return sends

    def waiting_for(self, now: float) -> str:
        """For whom the round waits, and since when."""
        if not self._started:
            states = Counter(device.state for device in self.devices.values())
            there = ", ".join(f"{count} {state}" for state, count in states.items()) or "no device has joined"
            return f"round {self._round}: waiting for devices to join, for {now - self._opened:.0f} s ({there})"
        awaited = [self._described(number, now) for number in sorted(self.coordinator.waiting)]
        more = f" and {len(awaited) - _MOST_NAMED} more" if len(awaited) > _MOST_NAMED else ""
        names = "; ".join(awaited[:_MOST_NAMED]) or "devices to join: those that are here were asked"
        refused = [self._by_number[number].name for number in sorted(self.coordinator.dismissed)]
        without = f"; refused: {', '.join(refused[:_MOST_NAMED])}" if refused else ""
        return f"round {self._round}: waiting for {now - self._opened:.0f} s for {names}{more}{without}"

    def _described(self, number: int, now: float) -> str:
        device = self._by_number.get(number)
        if device is None:
            return f"device {number} (nobody has joined with this number)"
        if device.state == "asked" and device.asked_at is not None:
            return f"{device.name} (device {number}, asked {now - device.asked_at:.0f} s ago)"
        seen = "never seen" if device.last_seen is None else f"last seen {now - device.last_seen:.0f} s ago"
        return f"{device.name} (device {number}, {device.state}, {seen})"

    # Who takes part.

    def _on_join(self, name: str, instance: str, wanted: int) -> list[Send]:
        number = self._number_for(name, wanted)
        if isinstance(number, Leave):
            return [Send(name, instance, number)]
        sends = self._make_room() if name not in self.devices else []
        device = self.devices.setdefault(name, Device(name, number, self.states))
        if not device.enrolled:
            device.number, device.movable = number, wanted == ANY_NUMBER
        if device.instance != instance:
            if device.instance:
                reason = f"another device joined as {name}; give every device a name of its own"
                sends.append(self._send_to(device, Leave(reason)))
            self._mark_gone(device)
            device.instance, device.answered = instance, None
        # One that is ready stays so: its Ready, which follows every Welcome, brings it an order that it may have lost.
        if device.state == "gone":
            device.state = "joining"
        return [*sends, self._send_to(device, self._welcome(device))]

    def _welcome(self, device: Device) -> Welcome:
        return Welcome(
            self.coordinator.rules.run, device.number, self._program_hash, len(self._program), self._batch,
            self.coordinator.vectors,
        )  # fmt: skip

    def _number_for(self, name: str, wanted: int) -> int | Leave:
        """The number of a name in this run, or why it cannot have one."""
        known, count = self.devices.get(name), self.coordinator.rules.devices
        if known is not None and known.enrolled:
            if wanted in (ANY_NUMBER, known.number):
                return known.number
            return Leave(
                f"{name} is device {known.number} of this run and asked to be {wanted}; ask for its own number"
            )
        if self._closed:
            return Leave(f"{name} is not enrolled in this run; enrol it with foreseed fleet enrol, or check --name")
        if wanted == ANY_NUMBER:
            free = [number for number in range(count) if number not in self._by_number]
            if not free:
                return Leave(f"the run is full: it has {count} devices, and all have joined")
            # Of those that nobody is on the way to, if there are any left.
            others = {device.number for device in self.devices.values() if device is not known}
            return next((number for number in free if number not in others), free[0])
        if wanted >= count:
            return Leave(f"device {wanted} is not of this run; ask for a number from 0 to {count - 1}")
        holder = self._by_number.get(wanted)
        if holder is not None and not holder.movable:
            return Leave(f"device {wanted} of this run is {holder.name}; ask for another number")
        return wanted

    def _make_room(self) -> list[Send]:
        """Forget the device that has been joining for longest, where as many are as the run has numbers."""
        joining = [device for device in self.devices.values() if not device.enrolled]
        if len(joining) < self.coordinator.rules.devices:
            return []
        self._forget(joining[0])
        return [self._send_to(joining[0], Leave("others joined before it was ready; start it again"))]

    def _enrol(self, device: Device) -> list[Send]:
        """Give a device that is ready its number for good, or another one if somebody else was ready first."""
        holder = self._by_number.get(device.number)
        # One that asked for the number has it before one that took any.
        if holder is not None and (device.movable or not holder.movable):
            return self._give_way(device)
        numbers = {
            known.name: known.number for known in self.devices.values() if known.enrolled and known is not holder
        }
        self._enrolled(numbers | {device.name: device.number})
        self._by_number[device.number], device.enrolled = device, True
        if holder is None:
            return []
        self._failed.discard(holder.number)
        holder.enrolled, holder.state = False, "gone"
        return self._give_way(holder)

    def _give_way(self, device: Device) -> list[Send]:
        """Another number for a device that has none any more; one that asked for that very number is sent away."""
        sends = self._on_join(device.name, device.instance, ANY_NUMBER if device.movable else device.number)
        if isinstance(sends[0].message, Leave):
            self._forget(device)
        return sends

    def _forget(self, device: Device) -> None:
        device.state = "gone"
        del self.devices[device.name]

    def _mark_gone(self, device: Device) -> None:
        if device.state == "asked":
            self._failed.add(device.number)
        device.state = "gone"

    # What members say.

    def _dispatch(self, name: str, instance: str, message: Message, now: float) -> list[Send]:
        device = self.devices.get(name)
        if device is None:
            return self._refuse("unknown name")
        if device.instance != instance:
            return self._refuse("wrong instance")
        assert isinstance(message, Ready | Fetch | Reply)
        if not self.coordinator.rules.run.startswith(message.run):  # of which a reply has the beginning
            return self._refuse("foreign run")
        if isinstance(message, Ready):
            return self._on_ready(device, message, now)
        if isinstance(message, Fetch):
            return self._on_fetch(device, message)
        return self._on_reply(device, message)

    def _on_ready(self, device: Device, message: Ready, now: float) -> list[Send]:
        sends = [] if device.enrolled else self._enrol(device)
        if not device.enrolled:
            return sends
        if device.samples not in (0, message.samples):
            self.refused["samples declared anew"] += 1
            self._say(f"{self._named(device)}: declares {message.samples} samples now, and {device.samples} before")
        device.samples = self.coordinator.declared[device.number] = message.samples
        self.coordinator.holds(device.number, message.held)
        device.held = int(self.coordinator.state.last_seen[device.number])
        if device.answered is not None:
            # If it lost the ack with its connection, its next answer would have the bytes of the last one once more.
            sends.append(self._acknowledge(device, device.answered))
        if device.number in self.coordinator.waiting and not self.complete:
            return sends + self._send_orders([self.coordinator.order(device.number)], now)
        if any(reply.device == device.number for reply in self.coordinator.replies):
            device.state = "answered"
        else:
            device.state = "refused" if device.number in self.coordinator.dismissed else self._idle_state(device)
        return sends

    def _on_fetch(self, device: Device, message: Fetch) -> list[Send]:
        what, round, offset = message.what, message.round, message.offset
        if (what, round) == (PROGRAM, 0):
            source = self._program
        elif (what, round) == (STATE, self.coordinator.state.round):
            if self._state[0] != round:
                self._state = (round, self.coordinator.state_bytes())
            source = self._state[1]
        else:
            return self._refuse("fetch of another state")
        data = source[offset : offset + CHUNK]
        if not data:
            return self._refuse("fetch beyond the end")
        return [self._send_to(device, Chunk(message.run, what, round, offset, data))]

    def _on_reply(self, device: Device, reply: Reply) -> list[Send]:
        forged = reply.device != device.number
        if forged:
            self._refuse("forged device number")
        reason = "forged device number" if forged else self.coordinator.receive(reply)
        if reason is None:
            self._failed.discard(device.number)
            device.failures = device.rests_until = 0
            device.held, device.movable = reply.round - 1, False
            device.peak_kib, device.answered = reply.peak_kib, reply.round
            device.sent, device.received = device.sent + reply.sent, device.received + reply.received
            if device.state == "asked":
                device.state = "answered"
        elif device.state == "asked" and device.number in self.coordinator.dismissed:
            self._rest(device, reason)
        if reason is None or (reply.round == device.answered and not forged):
            # One that comes again is told of the first, which counts.
            return [self._acknowledge(device, reply.round)]
        return [self._acknowledge(device, reply.round, reason)]

    def _acknowledge(self, device: Device, round: int, refused: str = "") -> Send:
        return self._send_to(device, Ack(self.coordinator.rules.run, round, refused))

    def _rest(self, device: Device, reason: str) -> None:
        """Of a device that said what cannot be: no more of it in this round, nor in the next ones."""
        device.state, device.refused = "refused", device.refused + 1
        device.failures = max(device.failures, self.rules.rest_after - 1)
        self._failed.add(device.number)
        if device.refused & (device.refused - 1) == 0:  # the first time, the second, the fourth, ...
            again = f" ({device.refused} times so far)" if device.refused > 1 else ""
            self._say(f"{self._named(device)}: its answer to round {self._round} is refused: {reason}{again}")

    def _named(self, device: Device) -> str:
        return f"{device.name} (device {device.number})"

    # Rounds.

    @property
    def _is_open(self) -> bool:
        return self._round == self.coordinator.round

    def _start(self, now: float) -> list[Send]:
        rules = self.coordinator.rules
        if self.rules.sample == "all":
            self._started = True
            orders = self.coordinator.open()
            here = {device.number for device in self.devices.values() if device.state == "ready"}
            return self._send_orders((order for order in orders if order.device in here), now)
        wanted = max(self.rules.min_replies, min(rules.per_round + self.rules.extra, rules.devices - self._resting))
        ready, waiting_for_more = self.states["ready"], now < self._opened + self.rules.gather
        too_few = ready + self.states["resting"] < self.rules.min_replies
        if too_few or (waiting_for_more and ready < min(wanted, self._last_present)):
            return []
        self._started, self._deadline = True, now + self._timeout
        self._last_present = ready
        return self._send_orders(self.coordinator.open(self._candidates(0), self.rules.extra), now)

    def _ask_again(self, now: float) -> list[Send]:
        """Begin the round anew: all its answers were refused."""
        self._forgive()
        return self._start(now)

    def _forgive(self) -> None:
        """Let devices whose answers were refused be asked again, since the round finds too few others."""
        for number in self.coordinator.forgive():
            device = self._by_number[number]
            device.state = self._idle_state(device) if device.state == "refused" else device.state

    def _ask_others(self, expected: int, now: float) -> list[Send]:
        """Ask as many more as it takes to expect per_round replies."""
        rules = self.coordinator.rules
        lacking = rules.per_round - expected
        if lacking <= 0 or not self.states["ready"] + self.states["resting"]:
            return []
        others = sample(rules.seed, self._round, self._candidates(expected), lacking)
        return self._send_orders(self.coordinator.ask_others(others), now)

    def _candidates(self, expected: int) -> list[int]:
        """Devices that can be asked; resting ones too, where min_replies could not be reached without."""
        ready = [device.number for device in self.devices.values() if device.state == "ready"]
        if expected + len(ready) >= self.rules.min_replies:
            return ready
        return ready + [device.number for device in self.devices.values() if device.state == "resting"]

    def _send_orders(self, orders: Iterable[OrderMessage], now: float) -> list[Send]:
        sends = []
        for order in orders:
            device = self._by_number[order.device]
            # A device that is ready again in the same round gets no more time than it had.
            device.state, device.due = "asked", min(device.due, now + self._timeout)
            device.asked_at = device.asked_at or now
            sends.append(self._send_to(device, order))
        return sends

    def _count_failure(self, device: Device) -> None:
        device.failures += 1
        again = device.failures - self.rules.rest_after
        if again >= 0 and self.rules.sample == "present":
            device.rests_until = self._round + self.rules.rest_rounds * 2 ** min(again, _MAX_DOUBLINGS)

    def _idle_state(self, device: Device) -> DeviceState:
        return "resting" if device.rests_until > self._round else "ready"

    def _send_to(self, device: Device, message: Message) -> Send:
        device.payload_down += len(encode(message))
        return Send(device.name, device.instance, message)

    def _refuse(self, reason: str) -> list[Send]:
        self.refused[reason] += 1
        return []

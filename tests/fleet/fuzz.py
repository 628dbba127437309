"""Fuzz both ends of the protocol: no bytes may raise, and none but a valid message may change anything.

    python -m tests.fleet.fuzz --count 1000000 --seed 1

Messages of every type are damaged in bits, bytes and fields, and mixed with CBOR and bytes of no meaning. After each
one the receiver's state is compared with the state before; a change is only right if the message was a whole one that
its sender could send at that moment.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import cbor2

from foreseed.device.member import Member
from foreseed.engine import ProgramError
from foreseed.wire import (
    ANY_NUMBER,
    CHUNK,
    PROGRAM,
    RUN_TAG,
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
    Welcome,
    WireError,
    decode,
    encode,
)
from tests.device.scripted import Server, small_coordinator, small_program, write_shard
from tests.fleet.stage import RUN, answer_to, full, instance_of, orders

SCENE = 250
"""Messages into one scene, before valid ones among them have turned it into another."""


class Damage:
    """Damaged messages, at random."""

    def __init__(self, chance: Random, valid: list[Message]) -> None:
        self._chance, self._valid = chance, [encode(message) for message in valid]
        self._items = [cbor2.loads(data) for data in self._valid]
        self._ways = [self._whole, self._bits, self._pieces, self._fields, self._cbor, self._junk]

    def next(self) -> bytes:
        return self._chance.choices(self._ways, (2, 4, 2, 4, 1, 1))[0]()

    def _whole(self) -> bytes:
        return self._chance.choice(self._valid)

    def _bits(self) -> bytes:
        data = bytearray(self._whole())
        for _ in range(self._chance.randrange(1, 4)):
            # Most of the structure is in the first bytes.
            at = self._chance.randrange(len(data) if self._chance.random() < 0.5 else min(len(data), 30))
            data[at] = self._chance.choice((data[at] ^ 1 << self._chance.randrange(8), self._chance.randrange(256)))
        return bytes(data)

    def _pieces(self) -> bytes:
        one, other = self._whole(), self._whole()
        at, to = self._chance.randrange(len(one) + 1), self._chance.randrange(len(other) + 1)
        head, tail = one[:at], one[at:]
        return self._chance.choice((head, head + other[to:], one + other[:to], head + other[:to] + tail))

    def _fields(self) -> bytes:
        items = list(self._chance.choice(self._items))
        items[self._chance.randrange(len(items))] = self._item(2)
        if self._chance.random() < 0.1:
            items.insert(self._chance.randrange(len(items)), self._item(1))
        return cbor2.dumps(items)

    def _cbor(self) -> bytes:
        return cbor2.dumps(self._item(4))

    def _junk(self) -> bytes:
        return self._chance.randbytes(self._chance.randrange(80))

    def _item(self, depth: int) -> Any:
        chance = self._chance
        kind = chance.randrange(10 if depth else 8)
        if kind < 3:
            return chance.choice((-2, -1, 0, 1, 2, 3, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, -(2**64), 2**70))
        if kind < 5:
            return chance.randbytes(chance.choice((0, 4, 8, 12, 16, 28)))
        if kind < 8:
            return chance.choice((None, True, False, 1.5, float("nan"), float("inf"), "", "text", "\n", "x" * 301, RUN))
        items = [self._item(depth - 1) for _ in range(chance.randrange(5))]
        return items if kind == 8 else dict(enumerate(items))


class ServerScene:
    """A conductor in the middle of a round, and what may be said to it."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.stage, sent = full(devices=7, per_round=4, min_replies=3, bits=chance.choice((1, 32)))
        for _ in range(2):
            for send in sent:
                self.stage.answer(send)
            sent = orders(self.stage.close())
        self.stage.answer(sent[0])
        replies = [answer_to(send.message) for send in sent if isinstance(send.message, OrderMessage)]
        self.damage = Damage(chance, [*replies, *replies, *lies(replies[0]), *others(replies[0])])
        names = [*(send.name for send in sent), *"abcdef"]
        self.senders = [(name, instance_of(name)) for name in names] + [
            ("a", instance_of("a", 1)), ("new", instance_of("new")), ("-", "01234567"), ("a", "x"), ("", ""),
        ]  # fmt: skip
        self.before = self.fingerprint()

    @property
    def refused(self) -> Counter[str]:
        return self.stage.conductor.refused

    def fingerprint(self) -> tuple[Any, ...]:
        """All that must not change: first the model, then who is there, was asked and has answered."""
        coordinator, devices = self.stage.coordinator, self.stage.conductor.devices.values()
        state = coordinator.state
        return (
            (state.round, state.values.tobytes(), state.buffers[0].tobytes(), len(coordinator.log)),
            coordinator.waiting,
            coordinator.replies,
            state.last_seen.tobytes(),
            [(d.name, d.number, d.instance, d.state, d.held, d.samples, d.failures, d.rests_until) for d in devices],
            len(self.stage.stored),
        )

    def strike(self) -> bool:
        """One message; returns whether it changed anything, which must then be right."""
        data, (name, instance) = self.damage.next(), self.chance.choice(self.senders)
        waiting = self.before[1]
        if self.chance.random() < 0.1:
            instance = ""
            sends = self.stage.conductor.presence(name, data, self.stage.now)
        else:
            sends = self.stage.conductor.receive(name, instance, data, self.stage.now)
        for send in sends:
            assert decode(encode(send.message)) == send.message
        after = self.fingerprint()
        if after == self.before:
            return False
        assert after[0] == self.before[0], f"{name}: {data.hex()} changed the model"
        assert self.may_change(name, instance, data, waiting), f"{name}/{instance}: {data.hex()} changed something"
        self.before = after
        return True

    def may_change(self, name: str, instance: str, data: bytes, waiting: set[int]) -> bool:
        message = whole(data)
        if message is None or isinstance(message, Join):
            return message is not None
        device = self.stage.conductor.devices[name]
        if isinstance(message, Presence):
            return not instance and message.instance.hex() == device.instance
        if isinstance(message, Reply):
            # One that is of no use costs its device the round, no more.
            return message.round == 3 and message.run == RUN[:RUN_TAG] and message.device == device.number in waiting
        return isinstance(message, Ready) and message.run == RUN and instance == device.instance


def lies(reply: Reply) -> list[Message]:
    """Whole messages that cannot be true."""
    return [
        reply._replace(losses=array("f", [nan]).tobytes() + reply.losses[4:]),
        reply._replace(losses=reply.losses[:4] + array("f", [1e30]).tobytes() + reply.losses[8:]),
        reply._replace(losses=reply.losses[:4] + array("f", [-inf]).tobytes() + reply.losses[8:]),
        reply._replace(losses=reply.losses[:8] + b"\xff" * len(reply.losses[8:])),
        reply._replace(samples=10**9),
    ]  # fmt: skip


def others(reply: Reply) -> list[Message]:
    """A message of every type that a server in this scene may get, and some that it may not."""
    instance = bytes.fromhex(instance_of("a"))
    return [
        Join(ANY_NUMBER), Join(6), Ready(RUN, 1, 20), Ready(RUN, 2, 20), Fetch(RUN, PROGRAM, 0, 0),
        Fetch(RUN, STATE, 2, 0), Presence(instance, True), Presence(instance, False), reply._replace(round=2),
        reply._replace(run=b"anot"), Ack(RUN, 3, ""), Leave("no"), Announce(RUN, b"an-epoch", False),
    ]  # fmt: skip


class DeviceScene:
    """A member of a run at some point of its way, and what may be said to it."""

    def __init__(self, chance: Random, shard: Path) -> None:
        program = small_program()
        server = Server(small_coordinator(program), program)
        order, welcome, chunk = server.order(), server.welcome(), server.chunk(Fetch(RUN, PROGRAM, 0, 0))
        self.chance, self.shard, self.way = chance, shard, [encode(welcome), encode(chunk), encode(order)]
        valid: list[Message] = [
            order, order._replace(round=2), order._replace(device=1), order._replace(run=b"another!"), welcome,
            welcome._replace(device=1), chunk, server.chunk(Fetch(RUN, STATE, 0, 0)), Ack(RUN, 1, ""),
            Ack(b"another!", 1, "late"), server.announce(), server.announce(True), Leave("the run is full"),
            Announce(b"another!", b"an-epoch", False), Join(ANY_NUMBER), Ready(RUN, 0, 12),
        ]  # fmt: skip
        self.damage = Damage(chance, valid)
        self.start_device()
        self.before = self.fingerprint()

    def start_device(self) -> None:
        self.member = Member(self.shard)
        self.awaited: Message | None = None
        for data in self.way[: self.chance.randrange(4)]:
            self.hear(self.member.receive(data))
        if self.member.round is not None and self.chance.random() < 0.5:
            self.hear(self.member.work())

    @property
    def refused(self) -> dict[str, int]:
        return self.member.refused

    def hear(self, said: list[Message]) -> None:
        for message in said:
            assert decode(encode(message)) == message
            self.awaited = message if isinstance(message, Fetch) else self.awaited

    def fingerprint(self) -> tuple[Any, ...]:
        member, state = self.member, self.member.state
        held = b"" if state is None else state.values.tobytes()
        return (
            member.welcome, member.run, member.round, member.epoch, member.finished, member.rejection, member.last_ack,
            member.held, held,
        )  # fmt: skip

    def strike(self) -> bool:
        """One message; returns whether it changed anything, which must then be right."""
        data, awaited = self.damage.next(), self.awaited
        try:
            self.hear(self.member.receive(data))
        except ProgramError:
            # The one way out: a device that gets damaged programs again and again says so, and ends.
            assert self.may_change(data, awaited)
            self.start_device()
        after = self.fingerprint()
        if after == self.before:
            return False
        assert self.may_change(data, awaited), f"{data.hex()} changed something"
        self.before = after
        return True

    def may_change(self, data: bytes, awaited: Message | None) -> bool:
        message, welcome = whole(data), self.member.welcome
        match message:
            case Announce() | Welcome() | Leave():
                return True
            case Chunk():
                return message[:4] == awaited and 0 < len(message.data) <= CHUNK
            case Ack():
                return message.run == self.member.run
            case OrderMessage():
                return welcome is not None and (message.run, message.device) == (welcome.run, welcome.device)
        return False


def whole(data: bytes) -> Message | None:
    try:
        return decode(data)
    except WireError:
        return None


def fuzz(count: int, seed: int) -> Counter[str]:
    """Send `count` messages, half of them to each end; returns what became of them. Raises at the first wrong one."""
    chance, happened = Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        shard = write_shard(Path(folder) / "shard.bin")

        def scenes() -> Iterator[ServerScene | DeviceScene]:
            while True:
                yield ServerScene(chance)
                yield DeviceScene(chance, shard)

        for scene in scenes():
            side = "server" if isinstance(scene, ServerScene) else "device"
            for _ in range(min(SCENE, count)):
                happened[f"{side}: valid"] += scene.strike()
                count -= 1
            for reason, times in scene.refused.items():
                happened[f"{side}: {reason}"] += times
            if not count:
                return happened
    raise AssertionError("unreachable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.perf_counter()
    happened = fuzz(arguments.count, arguments.seed)
    seconds = time.perf_counter() - began
    for what, times in sorted(happened.items()):
        print(f"{times:>9,}  {what}")
    print(f"{arguments.count:,} messages in {seconds:.1f} s, no exception, no change but by valid messages")


if __name__ == "__main__":
    main()

"""A server that says what it is told to say: a real coordinator, and the rest of the protocol by hand, without I/O."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from foreseed.coordinator import Coordinator, Optimiser, Rules
from foreseed.device.member import Member
from foreseed.engine.program import Act, Kind, Op, Program, assemble
from foreseed.methods.ntk_baffle import learn
from foreseed.wire import (
    CHUNK,
    PROGRAM,
    RUN_TAG,
    Ack,
    Announce,
    Chunk,
    Fetch,
    Join,
    Message,
    OrderMessage,
    Ready,
    Reply,
    Welcome,
    encode,
    program_hash,
)

RUN = b"run-name"


def small_program(channels: int = 4, norm_groups: int = 1) -> Program:
    """A network of some hundred values for images of 2x4x4 pixels in 3 classes; `norm_groups` 0 is BatchNorm."""
    ops = [
        Op(Kind.CONV, 0, flags=1, channels=channels, groups=1, window=(3, 3, 1, 1, 1, 1)),
        Op(Kind.NORM, 1, flags=1, groups=norm_groups, act=Act.RELU, eps=1e-5),
        Op(Kind.CONV, 2, flags=1, channels=3, groups=1, window=(4, 4, 1, 1, 0, 0)),
    ]
    # A third of the weights are left, in places that take some bytes to write down.
    random, counts = Random(1), (18 * channels, 48 * channels)
    first, last = (sorted(random.sample(range(count), count // 3)) for count in counts)
    return assemble((2, 4, 4), 3, [0.01, 0.01], [-1.0, -1.0], ops, [first, None, last])


def write_shard(path: Path, count: int = 12, seed: int = 1) -> Path:
    """Images for such a network."""
    random = Random(seed)
    path.write_bytes(b"".join(bytes([random.randrange(3), *random.randbytes(32)]) for _ in range(count)))
    return path


def small_coordinator(program: Program, optimiser: Optimiser | None = None, **rules: Any) -> Coordinator:
    settings = {"run": RUN, "seed": 7, "devices": 3, "per_round": 1, "k": 4, "sigma": 1e-3, **rules}
    values = np.random.default_rng(1).normal(0, 0.5, program.n_live)
    stats = np.zeros(program.n_stats)
    return Coordinator.start(Rules(**settings), optimiser or Optimiser(lr=0.05, momentum=0.9), values, stats)


LARGE = small_program(channels=2500)
"""It takes several chunks, and so does its state."""


class Server:
    """Answers members as the protocol says, and notes what they sent."""

    def __init__(self, coordinator: Coordinator, program: Program, batch: int = 0, epoch: bytes = b"epoch--1") -> None:
        self.coordinator, self.program, self.batch, self.epoch = coordinator, program.bytes, batch, epoch
        self.heard: list[Message] = []

    @property
    def run(self) -> bytes:
        return self.coordinator.rules.run

    def announce(self, finished: bool = False) -> Announce:
        return Announce(self.run, self.epoch, finished)

    def welcome(self, device: int = 0) -> Welcome:
        return Welcome(
            self.run, device, program_hash(self.program), len(self.program), self.batch, self.coordinator.vectors
        )

    def chunk(self, fetch: Fetch) -> Chunk:
        source = self.program if fetch.what == PROGRAM else self.coordinator.state_bytes()
        if fetch.what != PROGRAM:
            assert fetch.round == self.coordinator.state.round
        return Chunk(*fetch, source[fetch.offset : fetch.offset + CHUNK])

    def order(self, device: int = 0) -> OrderMessage:
        """The round's order for one device, whoever else was asked."""
        return next(order for order in self.coordinator.open([device]) if order.device == device)

    def take(self, message: Message, device: int = 0) -> list[Message]:
        """What the server says to a device's message; a reply counts."""
        self.heard.append(message)
        match message:
            case Join():
                return [self.welcome(device)]
            case Fetch():
                return [self.chunk(message)]
            case Ready():
                self.coordinator.holds(device, message.held)
            case Reply():
                return [Ack(RUN, message.round, self.coordinator.receive(message) or "")]
        return []


def converse(server: Server, member: Member, messages: list[Message], device: int = 0) -> list[Message]:
    """Carry messages to and fro, and let the member work, until both are silent; returns all that the member said."""
    said: list[Message] = []
    while messages:
        said += messages
        answers = [answer for message in messages for answer in server.take(message, device)]
        messages = [more for answer in answers for more in member.receive(encode(answer))] or member.work()
    return said


def join(server: Server, member: Member, device: int = 0) -> list[Message]:
    """Have a member join; returns all that it said."""
    return converse(server, member, member.connected(), device)


def needed_bytes(server: Server, member: Member, budget: int) -> int:
    """The budget that a member asks for, since what it has does not do."""
    join(server, member)
    found = re.search(rf"needs at least (\d+) bytes here, the budget is {budget};", member.rejection or "")
    assert found is not None, member.rejection
    return int(found[1])


def ask(server: Server, member: Member, order: OrderMessage) -> list[Message]:
    """Give a member an order; returns all that it said, the reply last if all went well."""
    return converse(server, member, member.receive(encode(order)) or member.work(), order.device)


def without_costs(reply: Message) -> Reply:
    assert isinstance(reply, Reply)
    return reply._replace(compute_ms=0, peak_kib=0, sent=0, received=0)


def kinds(messages: list[Message]) -> list[type[Message]]:
    return [type(message) for message in messages]


def serve(program: Program | None = None, batch: int = 0, **rules: Any) -> Server:
    program = program or small_program()
    return Server(small_coordinator(program, **rules), program, batch)


def play(server: Server, member: Member, rounds: int = 1, device: int = 0) -> list[Message]:
    """Rounds that this device alone answers."""
    for _ in range(rounds):
        said = ask(server, member, server.order(device))
        assert isinstance(said[-1], Reply)
        learn(server.coordinator)
    return said


def play_without(server: Server, rounds: int = 1, device: int = 1) -> None:
    """Rounds that another device answers."""
    for _ in range(rounds):
        order = server.order(device)
        losses = np.random.default_rng(order.round).normal(0, 1e-3, 1 + order.k * order.local_steps)
        reply = Reply(order.run[:RUN_TAG], order.round, device, 9, losses.astype("<f4").tobytes())
        assert server.coordinator.receive(reply) is None
        learn(server.coordinator)


def times_of(member: Member, until: float) -> list[tuple[float, Message]]:
    """When a member says what, looked at every second."""
    return [(now, message) for now in np.arange(1000, 1000 + until) for message in member.tick(float(now))]


def everything(thing: Any) -> Any:
    """All of a member that a message could change, but for the count of those refused, as it is now."""
    if isinstance(thing, Member):
        return {name: everything(part) for name, part in vars(thing).items() if name not in ("refused", "worker")}
    if isinstance(thing, list):
        return [everything(part) for part in thing]
    if isinstance(thing, array):
        return thing.tobytes()
    if isinstance(thing, tuple) or not hasattr(thing, "__slots__"):
        return thing
    return {name: everything(getattr(thing, name)) for name in thing.__slots__}

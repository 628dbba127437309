"""Whatever devices and the network do, and in whatever order: rounds stay sound, and go on once things go well."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from foreseed.config.schema import Fleet
from foreseed.coordinator import Coordinator
from foreseed.fleet.conductor import Conductor, Send
from foreseed.methods.ntk_baffle import learn
from foreseed.wire import (
    ANY_NUMBER,
    NOTHING_HELD,
    Ack,
    Announce,
    Join,
    Leave,
    Message,
    OrderMessage,
    Presence,
    Ready,
    Reply,
    Welcome,
    encode,
)
from tests.fleet.stage import PROGRAM_BYTES, answer_to, coordinator_for, instance_of

DEVICES, PER_ROUND, MIN_REPLIES = 6, 3, 2
NAMES = [f"device-{i}" for i in range(DEVICES)]
PATIENCE = 500
"""Seconds that a round may take once everybody is well: deadlines, rests and gathering are far shorter."""


@dataclass
class Actor:
    """One process of a device: it answers what it gets, and forgets all when it dies."""

    name: str
    life: int
    alive: bool = True
    inbox: list[Message] = field(default_factory=list)

    @property
    def instance(self) -> str:
        return instance_of(self.name, self.life)

    @property
    def will(self) -> bytes:
        return encode(Presence(bytes.fromhex(self.instance), False))

    def take(self, message: Message) -> list[Message]:
        match message:
            case _ if not self.alive:
                return []
            case Announce():
                return [Join(ANY_NUMBER)]
            case Welcome():
                return [Ready(message.run, NOTHING_HELD, 20)]
            case OrderMessage():
                return [answer_to(message)]
            case Leave():
                self.alive = False
        return []


class World:
    """The server, its devices, and a network that delays, reorders, loses and duplicates."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.rules = Fleet(
            sample="all" if seed % 4 == 0 else "present", min_replies=MIN_REPLIES, deadline=20.0, gather=5.0,
            extra=self.chance.randrange(3), rest_after=self.chance.randrange(1, 4), rest_rounds=2,
        )  # fmt: skip
        self.now = 0.0
        self.stored: dict[str, int] = {}
        self.actors: dict[str, Actor] = {}
        self.uplink: list[tuple[str, str, bytes]] = []
        self.wills: list[tuple[str, bytes]] = []
        self.honest: dict[tuple[int, int], Reply] = {}
        """What every device that an order went to would answer, by round and device."""
        self.participants: dict[int, list[int]] = {}
        self.start_server(coordinator_for(DEVICES, PER_ROUND))
        self.happened: Counter[str] = Counter()

    def start_server(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.conductor = Conductor(
            coordinator, self.rules, PROGRAM_BYTES, 0, b"an-epoch", dict(self.stored), self.store
        )
        self.kept = deepcopy(coordinator.state)
        for actor in self.actors.values():
            actor.inbox.append(self.conductor.announce)
        self.conductor.open(self.now)

    def store(self, numbers: dict[str, int]) -> None:
        assert self.stored.items() <= numbers.items()
        assert len(set(numbers.values())) == len(numbers)
        assert set(numbers.values()) <= set(range(DEVICES))
        self.stored = dict(numbers)

    # What happens.

    def starts(self) -> None:
        self.start_device(self.chance.choice(NAMES))

    def start_device(self, name: str) -> None:
        """A device starts; perhaps another of its name is running, which then dies of it."""
        old = self.actors.get(name)
        self.actors[name] = Actor(name, old.life + 1 if old else 0)
        if old is not None and old.alive:
            self.wills.append((name, old.will))
        self.publish(self.actors[name], Join(ANY_NUMBER))

    def dies(self) -> None:
        actor = self.some_actor()
        actor.alive = False
        if self.chance.random() < 0.7:
            self.wills.append((actor.name, actor.will))

    def connects_again(self) -> None:
        actor = self.some_actor()
        if actor.alive:
            actor.inbox.clear()
            self.publish(actor, Join(ANY_NUMBER))

    def network_moves(self) -> None:
        for actor in self.actors.values():
            inbox, actor.inbox = actor.inbox, []
            for message in self.chance.sample(inbox, len(inbox)):
                if self.chance.random() < 0.95:
                    self.hand_over(actor, message)
        uplink, self.uplink = self.uplink, []
        for sent in self.chance.sample(uplink, len(uplink)):
            fate = self.chance.random()
            if fate < 0.9:
                self.deliver(self.conductor.receive(*sent, self.now))
            if fate > 0.85:
                self.uplink.append(sent)

    def death_is_told(self) -> None:
        if self.wills:
            name, will = self.wills.pop(self.chance.randrange(len(self.wills)))
            self.deliver(self.conductor.presence(name, will, self.now))

    def liar_sends_what_cannot_be(self) -> None:
        if not self.honest:
            return
        reply = self.chance.choice(list(self.honest.values()))
        name = next(name for name, number in self.stored.items() if number == reply.device)
        instance = self.conductor.devices[name].instance or instance_of(name)
        lies = [
            (name, instance, reply._replace(round=self.coordinator.round + 1)),
            (name, instance, reply._replace(round=self.coordinator.round - 1)),
            (name, instance, reply._replace(run=b"anot")),
            (name, instance, reply._replace(device=(reply.device + 1) % DEVICES)),
            (name, instance, reply._replace(losses=reply.losses + bytes(4))),
            (name, "00000000", reply),
            ("stranger", instance, reply),
        ]
        liar, process, lie = self.chance.choice(lies)
        before = self.coordinator.replies
        sends = self.conductor.receive(liar, process, encode(lie), self.now)
        assert self.coordinator.replies == before
        closed = {(round, device) for round, devices in self.participants.items() for device in devices}
        counted = closed | {(reply.round, reply.device) for reply in before}
        for send in sends:
            if isinstance(send.message, Ack) and not send.message.refused:
                assert (send.message.round, self.stored[send.name]) in counted  # it says so of the answer that does
        self.deliver(sends)

    def time_passes(self) -> None:
        self.now += self.chance.choice([0.1, 5.0, 21.0])
        self.deliver(self.conductor.tick(self.now))

    def round_is_closed(self) -> None:
        if not self.conductor.complete:
            return
        self.happened["rounds"] += 1
        refused = len(self.coordinator.dismissed)
        closed = learn(self.coordinator)
        fewest = PER_ROUND - refused if self.rules.sample == "all" else MIN_REPLIES
        assert fewest <= len(closed.replies) <= PER_ROUND
        assert list(closed.replies) == [self.honest[closed.update.round, reply.device] for reply in closed.replies]
        self.participants[closed.update.round] = [reply.device for reply in closed.replies]
        self.kept = deepcopy(self.coordinator.state)
        self.conductor.open(self.now)
        states = Counter(device.state for device in self.conductor.devices.values())
        self.happened["rests"] += states["resting"]

    def server_is_killed_and_starts_again(self) -> None:
        state = deepcopy(self.kept)
        if self.rules.sample == "present":
            # The new server asks whom it finds. With "all" it asks the same devices, and takes replies on their way.
            self.honest = {key: reply for key, reply in self.honest.items() if key[0] <= state.round}
        self.start_server(Coordinator(self.coordinator.rules, self.coordinator.optimiser, state))

    # What must hold, and how messages travel.

    def check_that_only_closing_changes_the_model(self) -> None:
        state = self.kept
        assert self.coordinator.state.round == state.round
        assert np.array_equal(self.coordinator.state.values, state.values)
        assert np.array_equal(self.coordinator.state.buffers, state.buffers)
        assert self.coordinator.state.log == state.log

    def deliver(self, sends: list[Send]) -> None:
        """What the server sends is on its way to the process that it is for, if that lives."""
        for send in sends:
            message = send.message
            if isinstance(message, Welcome):
                assert all((name == send.name) == (number == message.device) for name, number in self.stored.items())
            if isinstance(message, OrderMessage):
                assert message.round == self.coordinator.round
                assert self.stored[send.name] == message.device
                self.honest[message.round, message.device] = answer_to(message)
            actor = self.actors.get(send.name)
            if actor is not None and actor.alive and actor.instance == send.instance:
                actor.inbox.append(message)

    def hand_over(self, actor: Actor, message: Message) -> None:
        for answer in actor.take(message):
            self.publish(actor, answer)

    def publish(self, actor: Actor, message: Message) -> None:
        self.uplink.append((actor.name, actor.instance, encode(message)))

    def some_actor(self) -> Actor:
        return self.chance.choice(list(self.actors.values()))

    def all_goes_well(self) -> None:
        """Everybody lives, whoever is sent away starts again, and all messages arrive."""
        for name in NAMES:
            if name not in self.actors or not self.actors[name].alive:
                self.start_device(name)
        while self.wills or self.uplink or any(actor.inbox for actor in self.actors.values()):
            while self.wills:
                self.death_is_told()
            uplink, self.uplink = self.uplink, []
            for sent in uplink:
                self.deliver(self.conductor.receive(*sent, self.now))
            for actor in self.actors.values():
                inbox, actor.inbox = actor.inbox, []
                for message in inbox:
                    self.hand_over(actor, message)
        self.now += 1
        self.deliver(self.conductor.tick(self.now))


EVENTS = {
    World.network_moves: 40, World.time_passes: 12, World.round_is_closed: 20, World.starts: 4, World.dies: 5,
    World.connects_again: 4, World.death_is_told: 6, World.liar_sends_what_cannot_be: 8,
    World.server_is_killed_and_starts_again: 1,
}  # fmt: skip


def live_through(seed: int, events: int = 300) -> World:
    """A run in a bad world, and three rounds more in a good one; all invariants checked after every event."""
    world = World(seed)
    for name in NAMES:
        world.start_device(name)
    for event in world.chance.choices(list(EVENTS), list(EVENTS.values()), k=events):
        event(world)
        world.check_that_only_closing_changes_the_model()
    world.happened["rounds in the bad world"] = world.happened["rounds"]
    world.happened["failures"] = sum(device.failures for device in world.conductor.devices.values())
    for actor in world.actors.values():
        world.publish(actor, Join(ANY_NUMBER))
    end = world.now + PATIENCE
    while world.happened["rounds"] < world.happened["rounds in the bad world"] + 3:
        assert world.now < end, "the run stands still"
        world.all_goes_well()
        world.round_is_closed()
        world.check_that_only_closing_changes_the_model()
    return world


@pytest.mark.parametrize("seed", range(40))
def test_rounds_stay_sound_and_go_on_whatever_happens(seed: int) -> None:
    world = live_through(seed)
    if world.rules.sample == "all":
        plain = coordinator_for(DEVICES, PER_ROUND)
        for _ in range(world.coordinator.state.round):
            # As the simulator goes through it again: without those whose answers were refused.
            for order in plain.open(world.participants[plain.round]):
                plain.receive(answer_to(order))
            learn(plain)
        np.testing.assert_array_equal(world.coordinator.state.values, plain.state.values)


def test_schedules_are_bad_enough() -> None:
    total: Counter[str] = Counter()
    for seed in range(8):
        world = live_through(seed)
        total += world.happened + world.conductor.refused
    assert total["rounds in the bad world"] > 20
    assert all(
        total[what] for what in ("failures", "rests", "late", "duplicate", "wrong instance", "not needed any more")
    )

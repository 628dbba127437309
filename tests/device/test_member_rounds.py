"""A device in its rounds: it catches up, follows orders, and takes no harm from whatever arrives."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest

from foreseed.coordinator import Optimiser
from foreseed.device import state as state_module
from foreseed.device.member import Member
from foreseed.device.worker import Worker
from foreseed.engine import SHARED_DEVICE
from foreseed.engine.blocks import Block
from foreseed.wire import (
    CHUNK,
    NOTHING_HELD,
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
    Presence,
    Ready,
    Reply,
    Welcome,
    encode,
)
from foreseed.wire.messages import MAX_DIRECTIONS
from tests.device.scripted import (
    LARGE,
    RUN,
    Server,
    ask,
    converse,
    everything,
    join,
    kinds,
    play,
    play_without,
    serve,
    small_coordinator,
    small_program,
    without_costs,
)

# --- catching up ---


@pytest.mark.parametrize("optimiser", [Optimiser(lr=0.05, momentum=0.0), Optimiser(lr=0.05), Optimiser("adam", 0.01)])
def test_rounds_that_were_missed_are_replayed(shard: Path, optimiser: Optimiser) -> None:
    program = small_program(channels=200)
    server, member = Server(small_coordinator(program, optimiser), program), Member(shard)
    join(server, member)
    play(server, member)
    play_without(server, 20)
    order = server.order()
    assert [update.round for update in order.updates] == list(range(1, 22))
    said = ask(server, member, order)
    assert kinds(said) == [Reply]
    assert member.held == 21
    assert member.state is not None
    assert member.state.values.tobytes() == server.coordinator.state.values.tobytes()
    for mine, its in zip(member.state.vectors, server.coordinator.state.buffers, strict=True):
        assert mine.tobytes() == its.tobytes()


def test_updates_that_are_held_already_are_not_applied_again(shard: Path) -> None:
    server, member = serve(small_program(channels=60)), Member(shard)
    join(server, member)
    play(server, member, 2)
    assert member.held == 1
    server.coordinator.holds(0, 0)  # what a server knows that has not seen the last reply
    order = server.order()
    assert [update.round for update in order.updates] == [1, 2]
    assert kinds(ask(server, member, order)) == [Reply]


@pytest.mark.parametrize("wrong", ["gap", "hash", "coefficients", "too far", "optimiser", "momentum"])
def test_updates_that_do_not_lead_to_the_values_make_it_fetch_the_state(shard: Path, wrong: str) -> None:
    server, member = serve(small_program(channels=60)), Member(shard)
    join(server, member)
    play(server, member)
    play_without(server, 3)
    order = server.order()
    updates = list(order.updates)
    assert [update.round for update in updates] == [1, 2, 3, 4]
    if wrong == "gap":
        del updates[1]
    elif wrong == "too far":
        updates.append(updates[-1]._replace(round=5))
    elif wrong == "coefficients":
        updates[2] = updates[2]._replace(parts=((1, array("f", [1.0] * 4).tobytes()),))
    elif wrong == "optimiser":
        updates[2] = updates[2]._replace(step=array("f", [0.1] * 7).tobytes())
    elif wrong == "momentum":
        assert member.state is not None
        member.state.vectors = []
        server.coordinator.state.buffers = []
    elif wrong == "hash":
        assert member.state is not None
        member.state.values[3] += 1
    said = ask(server, member, order._replace(updates=tuple(updates)))
    assert kinds(said) == [Fetch, Reply]
    assert said[0] == Fetch(RUN, STATE, 4, 0)
    assert member.held == 4
    assert member.state is not None
    assert member.state.values.tobytes() == server.coordinator.state.values.tobytes()


@pytest.mark.parametrize("optimiser", [Optimiser(momentum=0.0), Optimiser(), Optimiser("adam")])
def test_a_state_comes_in_chunks_with_the_vectors_after_the_values(shard: Path, optimiser: Optimiser) -> None:
    server, member = Server(small_coordinator(LARGE, optimiser, k=3), LARGE), Member(shard)
    join(server, member)
    play_without(server, 2)
    said = ask(server, member, server.order())
    total = 4 * LARGE.n_live * (1 + server.coordinator.vectors)
    assert server.coordinator.vectors == optimiser.n_buffers
    assert said[:-1] == [Fetch(RUN, STATE, 2, offset) for offset in range(0, total, CHUNK)]
    assert member.state is not None
    held = b"".join(vector.tobytes() for vector in (member.state.values, *member.state.vectors))
    assert held == server.coordinator.state_bytes()


def test_a_state_that_is_damaged_once_is_fetched_again_and_twice_drops_the_order(shard: Path) -> None:
    said: list[str] = []
    server, member = serve(), Member(shard, say=said.append)
    join(server, member)
    order = server.order()
    (fetch,) = member.receive(encode(order)) or member.work()
    good = server.chunk(fetch)  # type: ignore[arg-type]
    bad = good._replace(data=bytes([good.data[0] ^ 1]) + good.data[1:])
    assert member.receive(encode(bad)) == []
    assert member.work() == [fetch]
    assert (member.held, member.refused) == (NOTHING_HELD, {})
    member.receive(encode(good))
    assert kinds(member.work()) == [Reply]

    play_without(server)
    server.coordinator.holds(0, NOTHING_HELD)
    order = server.order()
    member.receive(encode(order))
    for _ in range(2):
        (fetch,) = member.work()
        good = server.chunk(fetch)  # type: ignore[arg-type]
        member.receive(encode(good._replace(data=bytes(len(good.data)))))
    assert member.work() == member.work() == []
    assert (member.held, member.round, member.refused) == (NOTHING_HELD, None, {"damaged state": 1})
    assert said == ["round 2: the state does not match its hash"]
    # The next order is a new chance.
    assert kinds(ask(server, member, order)) == [Fetch, Reply]


def test_a_replay_that_is_interrupted_leaves_no_values_rather_than_wrong_ones(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, member = serve(small_program(channels=60)), Member(shard)
    join(server, member)
    play(server, member)
    play_without(server)
    member.receive(encode(server.order()))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            member.work()
    assert member.held == NOTHING_HELD
    assert kinds(converse(server, member, member.work())) == [Fetch, Reply]


def test_a_download_that_has_begun_leaves_nothing_held_and_one_that_has_not_does(shard: Path) -> None:
    server, member = serve(LARGE), Member(shard)
    join(server, member)
    play(server, member)
    play_without(server)
    member.receive(encode(server.order()._replace(updates=())))
    (fetch,) = member.work()
    assert member.held == 0
    member.receive(encode(server.take(fetch)[0]))
    assert member.held == NOTHING_HELD


# --- orders ---


def test_a_newer_order_replaces_an_older_one_that_then_costs_nothing(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member)
    old = server.order()
    member.receive(encode(old))
    play_without(server)
    member.receive(encode(server.order()))
    assert member.round == 3
    assert member.receive(encode(old)) == []
    assert member.refused == {"stale order": 1}
    (reply,) = member.work()
    assert isinstance(reply, Reply)
    assert reply.round == 3
    assert member.work() == []


def test_a_newer_order_replaces_one_whose_state_is_on_its_way(shard: Path) -> None:
    server, member = serve(LARGE), Member(shard)
    join(server, member)
    member.receive(encode(server.order()))
    (fetch,) = member.work()
    (next_fetch,) = member.receive(encode(server.take(fetch)[0]))
    late = server.take(next_fetch)[0]
    play_without(server)
    order = server.order()
    member.receive(encode(order))
    assert member.receive(encode(late)) == []
    assert member.refused == {"unexpected chunk": 1}
    said = converse(server, member, member.work())
    assert said[0] == Fetch(RUN, STATE, 1, 0)
    assert without_costs(said[-1]).round == 2


def test_an_order_that_was_answered_is_answered_again_without_work(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    order = server.order()
    reply = ask(server, member, order)[-1]
    monkeypatch.setattr(Worker, "answer", None)
    assert member.receive(encode(order)) == [reply]
    assert member.work() == []
    assert join(server, member) == [Join(-1), Ready(RUN, 0, 12)]
    assert member.receive(encode(order._replace(updates=()))) == [reply]


def test_an_order_that_differs_in_anything_is_answered_anew(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    order = server.order()
    first = without_costs(ask(server, member, order)[-1])
    second = without_costs(ask(server, member, order._replace(k=2))[-1])
    assert second.losses == first.losses[:12]


def test_an_order_that_waits_is_not_taken_twice(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member)
    order = server.order()
    assert member.receive(encode(order)) == member.receive(encode(order)) == []
    assert kinds(member.work()) == [Reply]
    assert member.work() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": b"another-"}, "foreign run"),
        ({"device": 1}, "foreign device"),
        ({"round": 0}, "stale order"),
        ({"spread": 5}, "impossible order"),
        ({"sigma": 0.0}, "impossible order"),
        ({"local_lr": -1.0}, "impossible order"),
        ({"k": MAX_DIRECTIONS, "local_steps": 2}, "impossible order"),
        ({"blocks": (Block(1, 2, 1), Block(1, 2, 1))}, "impossible order"),
    ],
)
def test_an_order_for_others_or_for_nobody_changes_nothing(shard: Path, change: dict[str, Any], reason: str) -> None:
    said: list[str] = []
    server, member = serve(), Member(shard, say=said.append)
    join(server, member)
    before = everything(member)
    assert member.receive(encode(server.order()._replace(**change))) == []
    assert member.refused == {reason: 1}
    assert everything(member) == before
    assert len(said) == (reason == "impossible order")
    assert kinds(ask(server, member, server.order())) == [Fetch, Reply]


def test_an_order_before_the_program_is_here_changes_nothing(shard: Path) -> None:
    server, member = serve(LARGE), Member(shard)
    member.receive(encode(server.order()))
    member.receive(encode(server.welcome()))
    member.receive(encode(server.order()))
    assert member.refused == {"foreign run": 1, "not ready": 1}
    assert member.work() == []


def test_a_loss_that_is_not_finite_is_said_and_not_sent(shard: Path) -> None:
    said: list[str] = []
    server, member = serve(), Member(shard, say=said.append)
    server.coordinator.state.values[:] = 1e30
    join(server, member)
    assert kinds(ask(server, member, server.order())) == [Fetch]
    assert member.refused == {"not finite": 1}
    assert said == [
        "round 1: no answer: the loss is not finite: the values have grown too large; lower the learning rate or sigma"
    ]
    assert member.work() == []


def test_a_reply_tells_what_it_cost(shard: Path) -> None:
    server, member = serve(), Member(shard, costs=lambda: (123, 456, 789))
    join(server, member)
    reply = ask(server, member, server.order())[-1]
    assert isinstance(reply, Reply)
    assert reply[-3:] == (123, 456, 789)


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ([Ack(RUN, 2, "")], True),
        ([Ack(RUN, 2, ""), Ack(RUN, 2, "")], True),
        ([Ack(RUN, 2, "late")], False),
        ([Ack(RUN, 1, "")], False),
        ([Ack(b"another-", 2, "")], False),
        ([], False),
    ],
    ids=["counts", "twice", "refused", "of a round before", "of another run", "lost"],
)
def test_bytes_are_told_until_the_server_has_counted_them(shard: Path, said: list[Message], counted: bool) -> None:
    traffic = [100, 1000]
    server, member = serve(), Member(shard, costs=lambda: (1, *traffic))
    join(server, member)
    first = play(server, member)[-1]
    order = server.order()
    member.receive(encode(order))
    traffic[:] = 110, 1020
    (second,) = member.work()
    traffic[:] = 150, 1100
    assert member.receive(encode(order)) == [second]  # as it was, however often it is asked for
    for ack in said:
        member.receive(encode(ack))
    play_without(server)
    member.receive(encode(server.order()))
    (third,) = member.work()
    replies = [reply for reply in (first, second, third) if isinstance(reply, Reply)]
    told = [(reply.sent, reply.received) for reply in replies]
    assert told == [(100, 1000), (10, 20), (40, 80) if counted else (50, 100)]


# --- whatever arrives ---


def some_messages(server: Server) -> list[Message]:
    order = server.order()
    return [
        server.announce(), server.announce(True), Announce(b"another-", b"epoch--2", False), server.welcome(),
        server.welcome(2), order, order._replace(round=9), order._replace(updates=()), order._replace(k=2),
        server.chunk(Fetch(RUN, PROGRAM, 0, 0)), server.chunk(Fetch(RUN, STATE, server.coordinator.state.round, 0)),
        Chunk(RUN, STATE, 3, 0, bytes(99)), Ack(RUN, 1, "late"), Leave("full"), Presence(b"1234", True), Join(3),
        Reply(RUN[:RUN_TAG], 1, 0, 3, bytes(8)), Ready(RUN, 3, 1), Welcome(RUN, 1, bytes(16), 2**32 - 1, 2**32 - 1, 2),
        order._replace(device=SHARED_DEVICE),
    ]  # fmt: skip


def mutated(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice([0, 1, 1, 2, 5])):
        at = random.randrange(len(changed) + 1)
        match random.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                del changed[at : at + random.randrange(1, 9)]
            case 2:
                changed[at:at] = random.randbytes(random.randrange(1, 9))
            case _ if at < len(changed):
                changed[at] = random.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_arrives_is_taken_or_changes_nothing(shard: Path, seed: int) -> None:
    random, server = Random(seed), serve(small_program(channels=20))
    play_without(server, 3)
    refused = taken = 0
    for _ in range(150):
        member = Member(shard, memory_budget=random.choice([None, 1 << 20]))
        if random.random() < 0.8:
            join(server, member)
        for _ in range(40):
            data = mutated(random, encode(random.choice(some_messages(server))))
            before, count = everything(member), sum(member.refused.values())
            member.receive(data)
            if sum(member.refused.values()) > count:
                refused += 1
                assert everything(member) == before
            else:
                taken += 1
            if random.random() < 0.2:
                member.work()
    assert refused > 1000
    assert taken > 500


def test_noise_is_refused_at_every_stage(shard: Path) -> None:
    random, server, member = Random(1), serve(), Member(shard)
    stages: list[Any] = [
        lambda: None, lambda: member.receive(encode(server.welcome())), lambda: join(server, member),
        lambda: member.receive(encode(server.order())), member.work,
    ]  # fmt: skip
    for stage in stages:
        stage()
        before = everything(member)
        for _ in range(300):
            assert member.receive(random.randbytes(random.randrange(60))) == []
        assert everything(member) == before
    assert member.refused == {"malformed": 1500}

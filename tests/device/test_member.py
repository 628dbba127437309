"""A device in a run: the simulator's replies to the bit, whatever it missed, and no harm from whatever arrives."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from foreseed.device import state as state_module
from foreseed.device.member import Member
from foreseed.device.state import load, save
from foreseed.device.worker import Worker
from foreseed.engine import SHARED_DEVICE
from foreseed.methods import ntk_baffle
from foreseed.server import Optimiser
from foreseed.simulate import World, make_world
from foreseed.simulate.fleet import Fleet
from foreseed.wire import (
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
    join,
    kinds,
    needed_bytes,
    play,
    play_without,
    serve,
    small_coordinator,
    small_program,
    without_costs,
    write_shard,
)
from tests.simulate.small import WITH_BATCH_NORM, small_config, write_bars

NORM = {"model__name": WITH_BATCH_NORM}


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    bars = write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")
    return {"plain": make_world(small_config(bars)), "norm": make_world(small_config(bars, **NORM))}


# --- the simulator's bits ---


@contextmanager
def fleet_of(world: World) -> Iterator[Fleet]:
    fleet = Fleet(world)
    try:
        yield fleet
    finally:
        fleet.close()


def members_of(world: World, folder: Path, **options: Any) -> list[Member]:
    members = []
    for device in range(world.config.data.devices):
        path = folder / f"{device}.bin"
        path.write_bytes(world.records[world.starts[device] : world.starts[device + 1]].tobytes())
        members.append(Member(path, **options))
    return members


def assert_same_replies(world: World, folder: Path, rounds: int = 4, **options: Any) -> list[list[Message]]:
    """Hold rounds with members, and compare each reply with that of the simulated device; returns what was said."""
    coordinator = ntk_baffle.init(world).coordinator
    batch = world.config.train.batch if world.program.n_stats else 0
    server = Server(coordinator, world.program, batch)
    members, said = members_of(world, folder, **options), []
    for device, member in enumerate(members):
        join(server, member, device)
    with fleet_of(world) as fleet:
        for _ in range(rounds):
            orders = coordinator.open()
            for order, simulated in zip(orders, fleet.ask(orders, coordinator.state.values), strict=True):
                said.append(ask(server, members[order.device], order))
                assert without_costs(said[-1][-1]) == simulated
            coordinator.close()
    assert coordinator.state.round == rounds
    return said


def changed(world: World, **changes: Any) -> World:
    return replace(world, config=world.config.with_({key.replace("__", "."): x for key, x in changes.items()}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train__direction": "rademacher"},
        {"train__seeds": "shared"},
        {"train__spread": 3},
        {"train__difference": "central"},
        {"train__local_steps": 3, "train__local_lr": 0.05},
        {"train__optimiser": "adam"},
        {"train__momentum": 0.0},
        {"train__direction": "rademacher", "train__seeds": "shared", "train__spread": 2, "train__difference": "central",
         "train__local_steps": 2},
    ],
    ids=lambda settings: " ".join(key.removeprefix("train__") for key in settings) or "default",
)  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "norm"])
def test_replies_are_the_simulators_to_the_bit(
    worlds: dict[str, World], name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_replies(changed(worlds[name], **settings), tmp_path)


def test_batch_norm_statistics_are_those_of_the_servers_batches(worlds: dict[str, World], tmp_path: Path) -> None:
    # More images than a batch, and fewer: a batch that is never filled may as well be smaller.
    sizes = worlds["norm"].partition.sizes
    assert min(sizes) < 25 < max(sizes)
    assert_same_replies(changed(worlds["norm"], train__batch=25, data__per_round=6), tmp_path, rounds=2)


def test_devices_without_a_vector_fetch_the_state_every_time(worlds: dict[str, World], tmp_path: Path) -> None:
    # So many scalars a round that the values are cheaper.
    said = assert_same_replies(changed(worlds["plain"], train__k=200), tmp_path)
    assert all(kinds(messages) == [Fetch, Reply] for messages in said)


def test_engine_of_the_smallest_budget_gives_the_same_bits(worlds: dict[str, World], tmp_path: Path) -> None:
    world = worlds["plain"]
    server = Server(ntk_baffle.init(world).coordinator, world.program)
    budget = 2 * len(world.program.bytes)
    needed = needed_bytes(server, members_of(world, tmp_path, memory_budget=budget)[0], budget)
    assert_same_replies(world, tmp_path, memory_budget=needed)


# --- joining ---


def test_joining_asks_for_the_wanted_number_fetches_the_program_and_is_ready(shard: Path) -> None:
    server, member = serve(LARGE), Member(shard, wanted=2)
    said = join(server, member)
    pieces = -(-len(LARGE.bytes) // CHUNK)
    assert pieces > 1
    assert said == [
        Join(2), *(Fetch(RUN, PROGRAM, 0, CHUNK * i) for i in range(pieces)), Ready(RUN, NOTHING_HELD, 12)
    ]  # fmt: skip
    assert (member.run, member.held, member.refused) == (RUN, NOTHING_HELD, {})


def test_another_welcome_makes_ready_again_without_a_download(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member, 3)
    assert join(server, member) == [Join(-1), Ready(RUN, 2, 12)]


def test_a_welcome_amid_a_download_goes_on_with_it(shard: Path) -> None:
    server, member = serve(LARGE), Member(shard)
    (first,) = member.receive(encode(server.welcome()))
    (second,) = member.receive(encode(server.take(first)[0]))
    assert member.receive(encode(server.welcome())) == [second] == [Fetch(RUN, PROGRAM, 0, CHUNK)]


def test_a_server_that_starts_is_joined_once_for_each_start(shard: Path) -> None:
    server, member = serve(), Member(shard)
    assert converse(server, member, member.receive(encode(server.announce())))[0] == Join(-1)
    assert member.receive(encode(server.announce())) == []
    server.epoch = b"epoch--2"
    assert converse(server, member, member.receive(encode(server.announce()))) == [Join(-1), Ready(RUN, -1, 12)]
    assert member.receive(encode(server.announce())) == []


def test_a_server_that_was_not_there_to_hear_is_joined_when_it_says_that_it_is(shard: Path) -> None:
    server, member = serve(), Member(shard)
    converse(server, member, member.receive(encode(server.announce())))
    assert member.connected() == [Join(-1)]
    member.tick(1000)
    assert member.receive(encode(server.announce())) == []
    assert times_of(member, 3) == [(1001, Join(-1))]


def test_a_server_that_was_there_hears_of_a_device_once(shard: Path) -> None:
    server, member = serve(), Member(shard)
    said = member.connected() + member.receive(encode(server.announce()))
    said = converse(server, member, said)
    assert [message for message in said if isinstance(message, Join | Ready)] == [Join(-1), Ready(RUN, -1, 12)]
    assert times_of(member, 100) == []


def test_values_of_another_run_are_dropped_and_the_program_is_kept(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member, 2)
    other = serve(run=b"new-run-")
    assert join(other, member) == [Join(-1), Ready(b"new-run-", NOTHING_HELD, 12)]
    assert [type(message) for message in ask(other, member, other.order())] == [Fetch, Reply]


def test_another_program_is_fetched(shard: Path) -> None:
    member = Member(shard)
    join(serve(), member)
    server = serve(small_program(channels=5))
    assert kinds(join(server, member)) == [Join, Fetch, Ready]
    assert isinstance(ask(server, member, server.order())[-1], Reply)


def test_another_number_or_other_vectors_are_taken_on(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member)
    assert join(server, member, 2)[-1] == Ready(RUN, 0, 12)
    assert ask(server, member, server.order(2))[-1].device == 2  # type: ignore[union-attr]
    adam = Server(small_coordinator(small_program(), Optimiser("adam")), small_program())
    assert join(adam, member)[-1] == Ready(RUN, NOTHING_HELD, 12)


def test_a_damaged_program_is_fetched_again(shard: Path) -> None:
    server, member = serve(LARGE), Member(shard)
    damaged = bytearray(LARGE.bytes)
    damaged[CHUNK + 5] ^= 1
    server.program = bytes(damaged)
    welcome = serve(LARGE).welcome()
    messages = member.receive(encode(welcome))
    for _ in range(-(-len(damaged) // CHUNK)):
        (fetch,) = messages
        messages = member.receive(encode(server.take(fetch)[0]))
    assert messages == [Fetch(RUN, PROGRAM, 0, 0)]
    server.program = LARGE.bytes
    assert converse(server, member, messages)[-1] == Ready(RUN, NOTHING_HELD, 12)


def test_a_program_that_stays_damaged_is_given_up_after_three_times(shard: Path) -> None:
    server, member = serve(), Member(shard)
    messages = member.receive(encode(server.welcome()))
    server.program = server.program[:-1] + bytes([server.program[-1] ^ 1])
    converse(server, member, messages)
    assert member.rejection is not None
    assert member.rejection.startswith("the program arrived 3 times, each time damaged")
    assert [message for message in server.heard if isinstance(message, Fetch)] == 3 * [Fetch(RUN, PROGRAM, 0, 0)]
    # A server that starts anew is another chance.
    good = serve()
    good.epoch = b"epoch--2"
    assert kinds(converse(good, member, member.receive(encode(good.announce())))) == [Join, Fetch, Ready]
    assert member.rejection is None


@pytest.mark.parametrize(
    "change",
    [
        {"run": b"another-"},
        {"what": STATE},
        {"round": 1},
        {"offset": CHUNK},
        {"data": b"short"},
        {"data": bytes(CHUNK)},
    ],
)
def test_a_chunk_that_was_not_asked_for_changes_nothing(shard: Path, change: dict[str, Any]) -> None:
    server, member = serve(), Member(shard)
    (fetch,) = member.receive(encode(server.welcome()))
    (chunk,) = server.take(fetch)
    assert isinstance(chunk, Chunk)
    assert member.receive(encode(chunk._replace(**change))) == []
    assert member.refused == {"unexpected chunk": 1}
    assert member.receive(encode(chunk)) == [Ready(RUN, NOTHING_HELD, 12)]
    assert member.receive(encode(chunk)) == []
    assert member.refused == {"unexpected chunk": 2}


def test_a_shard_of_another_shape_is_the_users_to_see_and_put_right(tmp_path: Path) -> None:
    (tmp_path / "shard.bin").write_bytes(bytes(50))
    server, member = serve(), Member(tmp_path / "shard.bin")
    assert kinds(join(server, member)) == [Join, Fetch]
    assert member.rejection is not None
    assert "shard.bin: 50 bytes are no whole number of records of 33 bytes" in member.rejection
    assert times_of(member, 300) == []
    write_shard(tmp_path / "shard.bin")
    server.epoch = b"epoch--2"
    assert converse(server, member, member.receive(encode(server.announce())))[-1] == Ready(RUN, NOTHING_HELD, 12)


def test_acks_of_this_run_are_noted(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member)
    assert member.last_ack == Ack(RUN, 1, "")
    assert member.receive(encode(Ack(b"another-", 7, ""))) == []
    assert (member.last_ack.round, member.refused) == (1, {"foreign run": 1})


@pytest.mark.parametrize("stage", ["joining", "fetching", "ready", "asked", "answered"])
def test_a_device_that_is_sent_away_waits_for_another_epoch(shard: Path, stage: str) -> None:
    server, member = serve(LARGE), Member(shard)
    member.receive(encode(server.announce()))
    if stage == "fetching":
        assert kinds(member.receive(encode(server.welcome()))) == [Fetch]
    if stage in ("ready", "asked", "answered"):
        join(server, member)
    if stage in ("asked", "answered"):
        member.receive(encode(server.order()))
        (fetch,) = member.work()
    if stage == "answered":
        converse(server, member, [fetch])
    assert member.receive(encode(Leave("the run is full"))) == []
    assert member.rejection == "the server sent this device away: the run is full"
    assert member.work() == member.connected() == member.receive(encode(server.announce())) == []
    assert times_of(member, 300) == []
    server.epoch = b"epoch--2"
    said = converse(server, member, member.receive(encode(server.announce())))
    assert (said[0], type(said[-1])) == (Join(-1), Ready)
    assert Fetch not in kinds(said) or stage in ("joining", "fetching")
    assert member.rejection is None
    assert isinstance(ask(server, member, server.order())[-1], Reply)


def test_finished_is_the_run_of_this_device_only(shard: Path) -> None:
    server, member = serve(), Member(shard)
    member.connected()
    assert member.receive(encode(server.announce(finished=True))) == []
    assert not member.finished  # a run of the past
    server.epoch = b"epoch--2"
    join(server, member)
    member.receive(encode(server.announce()))
    member.receive(encode(serve(run=b"another-").announce(finished=True)))
    assert not member.finished
    member.receive(encode(server.announce(finished=True)))
    assert member.finished
    assert member.tick(0) == member.tick(1e6) == []
    member.receive(encode(serve(run=b"new-run-").announce()._replace(epoch=b"epoch--3")))
    assert not member.finished


def test_a_run_that_ends_before_a_device_could_join_is_finished_for_it_too(shard: Path) -> None:
    server, member = serve(), Member(shard)
    member.receive(encode(server.announce()))
    member.receive(encode(server.announce(finished=True)))
    assert member.finished


# --- questions are asked again ---


def times_of(member: Member, until: float) -> list[tuple[float, Message]]:
    """When a member says what, looked at every second."""
    return [(now, message) for now in np.arange(1000, 1000 + until) for message in member.tick(float(now))]


def test_an_unanswered_join_is_repeated_ever_more_rarely(shard: Path) -> None:
    member = Member(shard)
    assert times_of(member, 100) == []
    member.connected()
    times = [now - 1000 for now, message in times_of(member, 300) if message == Join(-1)]
    assert times == [5, 15, 35, 75, 135, 195, 255]


def test_an_unanswered_fetch_is_repeated_and_an_answered_one_is_not(shard: Path) -> None:
    server, member = serve(LARGE), Member(shard)
    (first,) = member.receive(encode(server.welcome()))
    assert [message for _, message in times_of(member, 20)] == [first, first]
    (second,) = member.receive(encode(server.take(first)[0]))
    assert [message for _, message in times_of(member, 8)] == [second] != [first]
    converse(server, member, [second])
    assert times_of(member, 200) == []


def test_a_lost_state_is_asked_for_again(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    (fetch,) = member.receive(encode(server.order())) or member.work()
    assert fetch == Fetch(RUN, STATE, 0, 0)
    assert [message for _, message in times_of(member, 6)] == [fetch]
    # The server asks again, since its order may have been lost: so may the fetch.
    assert member.receive(encode(server.order())) == [fetch]
    assert kinds(converse(server, member, [fetch])) == [Fetch, Reply]


def test_an_answer_is_repeated_until_the_server_has_it(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    (fetch,) = member.receive(encode(server.order())) or member.work()
    member.receive(encode(server.take(fetch)[0]))
    (reply,) = member.work()  # and it is lost
    times = times_of(member, 100)
    assert [now - 1000 for now, _ in times] == [5, 15, 35, 75]
    assert {message for _, message in times} == {reply}
    (ack,) = server.take(reply)  # and it is lost
    assert ack == Ack(RUN, 1, "")
    (again,) = member.tick(2000)
    (ack,) = server.take(again)
    assert ack == Ack(RUN, 1, "duplicate")
    member.receive(encode(ack))
    assert member.last_ack is None  # the first one counts: nobody should be told that this one does not
    assert times_of(member, 300) == []


@pytest.mark.parametrize("end", ["ack", "refusal", "order", "finished"])
def test_an_answer_that_is_of_no_use_any_more_is_not_repeated(shard: Path, end: str) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member)
    order = server.order()
    member.receive(encode(order))
    (reply,) = member.work()
    assert member.receive(encode(Ack(RUN, 1, "late"))) == []  # of a round before: it means another one
    assert [message for _, message in times_of(member, 7)] == [reply]
    ends: dict[str, Message] = {
        "ack": Ack(RUN, 2, ""), "refusal": Ack(RUN, 2, "late"), "order": order._replace(round=3),
        "finished": server.announce(finished=True),
    }  # fmt: skip
    member.receive(encode(ends[end]))
    assert times_of(member, 300) == []


def test_a_refusal_of_an_answer_that_was_sent_once_is_noted(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    play(server, member, 2)
    late = Ack(RUN, 2, "late")
    member.receive(encode(late))
    assert member.last_ack == late


def test_a_device_that_nobody_answers_asks_its_user_once(shard: Path) -> None:
    said: list[str] = []
    server, member = serve(), Member(shard, say=said.append)
    member.connected()
    assert len(times_of(member, 12)) == 1
    assert said == []  # once is chance
    assert member.tick(1015) == [Join(-1)]
    line = "no server answers; is one running, and is --name the name that the broker knows this device by?"
    assert said == [line]
    member.connected()
    assert len(times_of(member, 300)) > 2
    assert said == [line]
    join(server, member)
    member.connected()  # to a broker whose server has gone since
    assert len(times_of(member, 300)) > 2
    assert said == [line, line]


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


# --- after a restart ---


def test_a_restarted_device_goes_on_from_its_state_file(shard: Path, tmp_path: Path) -> None:
    server, member = serve(small_program(channels=60)), Member(shard)
    join(server, member)
    play(server, member, 2)
    assert member.state is not None
    save(tmp_path / "x.state", member.state)
    play(server, member, 3)
    again = Member(shard, saved=load(tmp_path / "x.state", pytest.fail))
    assert (again.run, again.held) == (RUN, 1)
    assert join(server, again) == [Join(-1), Ready(RUN, 1, 12)]
    order = server.order()
    assert [update.round for update in order.updates] == [2, 3, 4, 5]
    assert kinds(ask(server, again, order)) == [Reply]


def test_a_restarted_device_knows_that_its_run_is_finished(shard: Path) -> None:
    server, member = serve(), Member(shard)
    join(server, member)
    again = Member(shard, saved=member.state)
    again.receive(encode(server.announce(finished=True)))
    assert again.finished


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
    assert reply.forward_passes == 12 * 5


# --- whatever arrives ---


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


def some_messages(server: Server) -> list[Message]:
    order = server.order()
    return [
        server.announce(), server.announce(True), Announce(b"another-", b"epoch--2", False), server.welcome(),
        server.welcome(2), order, order._replace(round=9), order._replace(updates=()), order._replace(k=2),
        server.chunk(Fetch(RUN, PROGRAM, 0, 0)), server.chunk(Fetch(RUN, STATE, server.coordinator.state.round, 0)),
        Chunk(RUN, STATE, 3, 0, bytes(99)), Ack(RUN, 1, "late"), Leave("full"), Presence(b"1234", True), Join(3),
        Reply(RUN, 1, 0, 3, bytes(8), 3), Ready(RUN, 3, 1), Welcome(RUN, 1, bytes(16), 2**32 - 1, 2**32 - 1, 2),
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

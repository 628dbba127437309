"""A device joins a run, fetches what it needs, resends what nobody answered, and comes back after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cbor2
import pytest

from foreseed.coordinator import Optimiser
from foreseed.device.member import Member
from foreseed.device.state import load, save
from foreseed.wire import (
    CHUNK,
    NOTHING_HELD,
    PROGRAM,
    STATE,
    Ack,
    Chunk,
    Fetch,
    Join,
    Leave,
    Message,
    Ready,
    Reply,
    encode,
)
from tests.device.scripted import (
    LARGE,
    RUN,
    Server,
    ask,
    converse,
    join,
    kinds,
    play,
    serve,
    small_coordinator,
    small_program,
    times_of,
    write_shard,
)

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


def test_a_server_that_was_paused_and_wakes_up_is_ignored_for_the_one_that_took_its_place(shard: Path) -> None:
    folder, another_folder, member = b"fold", b"anew", Member(shard)
    first, second = (serve() for _ in range(2))
    first.epoch, second.epoch = folder + b"\0\x09\0\x01", folder + b"\0\x0a\0\x01"
    converse(first, member, member.receive(encode(first.announce())))
    converse(second, member, member.receive(encode(second.announce())))
    for finished in (False, True):
        assert member.receive(encode(first.announce(finished))) == []
    assert (member.epoch, member.finished, member.refused) == (second.epoch, False, {"older server": 2})
    # A number counts within its folder alone: of another one, the first server is welcome.
    first.epoch = another_folder + b"\0\x01\0\x01"
    assert member.receive(encode(first.announce())) == [Join(-1)]


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


# --- requests are sent again ---


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


def test_a_server_of_another_version_is_told_to_the_user_once(shard: Path) -> None:
    said: list[str] = []
    member = Member(shard, say=said.append)
    for _ in range(20):
        assert member.receive(cbor2.dumps([2, *cbor2.loads(encode(serve().announce()))[1:]])) == []
    assert said == [
        "the server cannot be understood: message version 2, this foreseed speaks 4; install the same foreseed here "
        "and there"
    ]
    assert member.refused == {"other version": 20}


def test_an_order_of_few_bits_with_local_steps_is_refused(shard: Path) -> None:
    said: list[str] = []
    server, member = serve(), Member(shard, say=said.append)
    join(server, member)
    assert member.receive(encode(server.order()._replace(bits=1, local_steps=2))) == []
    assert said == ["round 1: refused: 1 bits with 2 local steps, which the server could not replay"]


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

"""The conductor: who is let in, what it answers, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from foreseed.fleet.conductor import Send
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
    OrderMessage,
    Presence,
    Ready,
    Welcome,
    encode,
    messages,
    program_hash,
    values_hash,
)
from tests.fleet.stage import PROGRAM_BYTES, RUN, SAMPLES, Stage, answer_to, asked, full, instance_of, orders

HASH = program_hash(PROGRAM_BYTES)


def reason(sends: list[Send]) -> str:
    (send,) = sends
    assert isinstance(send.message, Leave)
    return send.message.reason


# --- joining ---


def test_new_names_get_the_numbers_they_want_or_the_lowest_free_ones() -> None:
    stage = Stage()
    for name, wanted, given in [("a", 1, 1), ("b", ANY_NUMBER, 0), ("c", ANY_NUMBER, 2), ("d", 5, 5)]:
        (send,) = stage.say(name, Join(wanted))
        assert send == (name, instance_of(name), Welcome(RUN, given, HASH, len(PROGRAM_BYTES), 0, 1))
    assert stage.stored == []
    for name in "adcb":
        stage.say(name, Ready(RUN, 0, 20))
    assert stage.stored[-1] == {"a": 1, "b": 0, "c": 2, "d": 5}


def test_device_that_never_becomes_ready_holds_nothing() -> None:
    stage = Stage(devices=2, per_round=1)
    stage.join("b", 0)
    stage.say("squatter", Join(ANY_NUMBER))
    (send,) = stage.say("a", Join(ANY_NUMBER))
    assert isinstance(send.message, Welcome)
    assert send.message.device == 1
    stage.say("a", Ready(RUN, 0, 20))
    assert stage.stored[-1] == {"b": 0, "a": 1}
    # The other one is told when it comes to it.
    assert "full" in reason(stage.say("squatter", Ready(RUN, 0, 20)))
    assert set(stage.conductor.devices) == {"a", "b"}


def test_device_that_asks_for_a_number_has_it_before_one_that_takes_any() -> None:
    stage = Stage(devices=3, per_round=3, sample="all")
    stage.open()
    assert asked(stage.join("squatter")) == {"squatter"}
    assert stage.conductor.devices["squatter"].number == 0
    stage.say("a", Join(0))
    welcome, order = stage.say("a", Ready(RUN, 0, 20))
    assert (welcome.name, welcome.message) == ("squatter", Welcome(RUN, 1, HASH, len(PROGRAM_BYTES), 0, 1))
    assert order.name == "a"
    # It takes part under its other number, and what it measured under the first is nobody's answer.
    (late,) = stage.say("squatter", answer_to(order.message))  # type: ignore[arg-type]
    assert late.message == Ack(RUN, 1, "forged device number")
    (other,) = stage.say("squatter", Ready(RUN, 0, 20))
    assert isinstance(other.message, OrderMessage)
    assert other.message.device == 1
    assert stage.stored[-1] == {"a": 0, "squatter": 1}
    # Once it has answered, its number is its own.
    stage.answer(other)
    assert reason(stage.say("b", Join(1))) == "device 1 of this run is squatter; ask for another number"


def test_device_that_has_to_give_way_in_a_full_run_is_told() -> None:
    stage = Stage(devices=1, per_round=1)
    stage.join("squatter")
    stage.say("a", Join(0))
    (send,) = stage.say("a", Ready(RUN, 0, 20))
    assert send.name == "squatter"
    assert "full" in send.message.reason  # type: ignore[union-attr]
    assert set(stage.conductor.devices) == {"a"}
    assert stage.stored[-1] == {"a": 0}


def test_with_an_enrolment_nobody_else_takes_part() -> None:
    stage = Stage(devices=2, per_round=1, numbers={"a": 1, "b": 0}, closed=True)
    assert "not enrolled" in reason(stage.say("c", Join(ANY_NUMBER)))
    (send,) = stage.say("a", Join(ANY_NUMBER))
    assert isinstance(send.message, Welcome)
    assert send.message.device == 1


def test_number_is_stored_before_its_device_is_asked() -> None:
    stage = Stage()

    def full_disk(numbers: dict[str, int]) -> None:
        raise OSError("no space left")

    stage.conductor._enrolled = full_disk
    stage.say("a", Join(ANY_NUMBER))
    with pytest.raises(OSError, match="no space left"):
        stage.say("a", Ready(RUN, 0, 20))
    assert stage.conductor.devices["a"].state == "joining"
    stage.conductor._enrolled = stage.stored.append
    stage.join("b", 1)
    assert stage.stored == [{"b": 1}]


def test_known_name_keeps_its_number_over_a_restart_of_the_server() -> None:
    stage = Stage(numbers={"a": 4, "b": 1})
    assert stage.conductor.devices["a"].state == "gone"
    (send,) = stage.say("a", Join(ANY_NUMBER))
    assert isinstance(send.message, Welcome)
    assert send.message.device == 4
    (send,) = stage.say("b", Join(1))
    assert isinstance(send.message, Welcome)
    (send,) = stage.say("c", Join(ANY_NUMBER))
    assert isinstance(send.message, Welcome)
    assert send.message.device == 0
    stage.say("c", Ready(RUN, 0, 20))
    assert stage.stored == [{"a": 4, "b": 1, "c": 0}]


def test_join_that_cannot_be_is_told_why_and_changes_nothing() -> None:
    stage = Stage(devices=3)
    stage.join("a", 1)
    before = {name: asdict(device) for name, device in stage.conductor.devices.items()}
    assert reason(stage.say("b", Join(1))) == "device 1 of this run is a; ask for another number"
    assert reason(stage.say("b", Join(3))) == "device 3 is not of this run; ask for a number from 0 to 2"
    said = reason(stage.say("a", Join(2), life=1))
    assert said == "a is device 1 of this run and asked to be 2; ask for its own number"
    assert {name: asdict(device) for name, device in stage.conductor.devices.items()} == before
    stage.join("b")
    stage.join("c")
    assert reason(stage.say("d", Join(ANY_NUMBER))) == "the run is full: it has 3 devices, and all have joined"
    assert set(stage.conductor.devices) == {"a", "b", "c"}


def test_strangers_are_not_remembered() -> None:
    stage = Stage(devices=3)
    for i in range(100):
        stage.say(f"device-{i}", Join(ANY_NUMBER))
        stage.conductor.presence(f"other-{i}", encode(Presence(b"inst", True)), 0.0)
        stage.say(f"third-{i}", Ready(RUN, 0, 1))
    assert len(stage.conductor.devices) == 3
    assert set(stage.conductor.refused) == {"unknown name"}


@pytest.mark.parametrize("name", ["", "-a", "a b", "a" * 65, "ä", "a\n"])
def test_names_that_no_device_may_have_are_refused(name: str) -> None:
    stage = Stage()
    assert stage.conductor.receive(name, "01234567", encode(Join(ANY_NUMBER)), 0.0) == []
    assert stage.conductor.receive("a", "0123456G", encode(Join(ANY_NUMBER)), 0.0) == []
    assert stage.conductor.devices == {}
    assert stage.conductor.refused == {"malformed name": 2}


def test_newest_process_of_a_name_wins_and_the_old_one_is_sent_away() -> None:
    stage, sent = full(per_round=6)
    old = sent[0]
    farewell, welcome = stage.say(old.name, Join(ANY_NUMBER), life=1)
    assert farewell[:2] == (old.name, old.instance)
    assert reason([farewell]) == f"another device joined as {old.name}; give every device a name of its own"
    assert welcome.instance == instance_of(old.name, 1)
    # Nothing from the old one counts any more, not even its farewell.
    assert stage.answer(old) == []
    assert orders(stage.leave(old.name)) == []
    assert stage.state(old.name) == "joining"
    assert stage.conductor.refused == {"wrong instance": 1}
    assert stage.coordinator.replies == ()


def test_join_again_of_the_same_process_is_welcomed_again() -> None:
    stage, sent = full()
    name = sent[0].name
    (send,) = stage.say(name, Join(ANY_NUMBER))
    assert isinstance(send.message, Welcome)
    assert stage.say(name, Ready(RUN, 0, 20)) == [sent[0]]


def test_announcement_tells_run_epoch_and_end() -> None:
    stage = Stage()
    assert stage.conductor.announce == Announce(RUN, b"an-epoch", False)
    stage.conductor.finished = True
    assert stage.conductor.announce == Announce(RUN, b"an-epoch", True)


# --- fetching ---


def fetch(stage: Stage, what: int, round: int, offset: int) -> list[Send]:
    return stage.say("a", Fetch(RUN, what, round, offset))


@pytest.mark.parametrize("what", [PROGRAM, STATE])
def test_program_and_state_come_in_chunks(what: int) -> None:
    stage, _ = full()
    whole = PROGRAM_BYTES if what == PROGRAM else stage.coordinator.state_bytes()
    data = b""
    while len(data) < len(whole):
        (send,) = fetch(stage, what, 0, len(data))
        assert isinstance(send.message, Chunk)
        assert send == Send("a", instance_of("a"), Chunk(RUN, what, 0, len(data), whole[len(data) : len(data) + CHUNK]))
        data += send.message.data
    assert data == whole
    assert fetch(stage, what, 0, len(whole)) == []
    assert stage.conductor.refused == {"fetch beyond the end": 1}


def test_only_the_state_of_now_can_be_fetched() -> None:
    stage, sent = full()
    assert fetch(stage, STATE, 1, 0) == []
    assert fetch(stage, PROGRAM, 1, 0) == []
    assert len(fetch(stage, STATE, 0, 0)) == 1
    for send in sent:
        stage.answer(send)
    stage.close()
    assert fetch(stage, STATE, 0, 0) == []
    (send,) = fetch(stage, STATE, 1, 0)
    assert isinstance(send.message, Chunk)
    assert send.message.data == stage.coordinator.state_bytes()[:CHUNK]
    assert stage.conductor.refused == {"fetch of another state": 3}


# --- orders and replies ---


def test_reply_is_acknowledged_and_counted_once() -> None:
    stage, sent = full()
    send = sent[0]
    assert stage.answer(send) == [(send.name, send.instance, Ack(RUN, 1, ""))]
    assert stage.answer(send) == [(send.name, send.instance, Ack(RUN, 1, ""))]  # which is said of the first
    assert stage.conductor.refused == {"duplicate": 1}
    assert [reply.device for reply in stage.coordinator.replies] == [send.message.device]  # type: ignore[union-attr]
    device = stage.conductor.devices[send.name]
    assert (device.state, device.peak_kib, device.sent, device.received, device.held) == ("answered", 20_000, 7, 8, 0)


def test_bytes_of_replies_that_count_are_added_up() -> None:
    stage, sent = full(per_round=6)
    device = stage.conductor.devices[sent[0].name]
    stage.answer(sent[0], round=0, sent=1000)
    assert device.sent == 0  # the next one has them too
    for send in sent:
        stage.answer(send)
    again = stage.close()
    (late,) = stage.answer(sent[0])  # once more, since its ack was lost
    assert late.message == Ack(RUN, 1, "")
    for send in again:
        stage.answer(send)
    assert (device.sent, device.received) == (14, 16)
    assert stage.conductor.refused == {"late": 2}


def test_a_device_that_comes_back_is_told_again_which_reply_counts() -> None:
    stage, sent = full(per_round=6)
    name = sent[0].name
    assert Ack not in {type(send.message) for send in stage.join(name)}
    for send in sent:
        stage.answer(send)
    assert stage.join(name)[-1].message == Ack(RUN, 1, "")
    stage.close()
    *_, ack, order = stage.join(name)
    assert (ack.message, type(order.message)) == (Ack(RUN, 1, ""), OrderMessage)  # before it answers the next order
    assert Ack not in {type(send.message) for send in stage.join(name, life=1)}  # another process has no such reply


def test_reply_in_the_name_of_another_device_is_refused() -> None:
    stage, sent = full()
    first, second = sent[0], sent[1]
    assert isinstance(second.message, OrderMessage)
    (send,) = stage.answer(first, device=second.message.device)
    assert send.message == Ack(RUN, 1, "forged device number")
    assert stage.coordinator.replies == ()
    assert stage.conductor.refused == {"forged device number": 1}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"round": 0}, "late"),
        ({"round": 2}, "early"),
    ],
)
def test_reply_of_another_round_changes_nothing_and_its_device_is_told(changes: dict[str, Any], why: str) -> None:
    stage, sent = full()
    (send,) = stage.answer(sent[0], **changes)
    assert send.message == Ack(RUN, changes.get("round", 1), why)
    assert stage.coordinator.replies == ()
    assert stage.conductor.refused == {why: 1}
    stage.answer(sent[0])
    assert len(stage.coordinator.replies) == 1


NAN = np.array([np.nan, 0, 0], "<f4").tobytes()
LIES: list[tuple[dict[str, Any], str]] = [
    ({"losses": bytes(8)}, "wrong length"),
    ({"stats": bytes(4)}, "wrong length"),
    ({"losses": NAN}, "not finite"),
    ({"losses": bytes(4) + NAN[:4] + bytes(4)}, "not finite"),
    ({"losses": np.array([1e30, 0, 0], "<f4").tobytes()}, "base loss: 1e+30 said, expected 0 to 2303"),
    ({"losses": np.array([-1, 0, 0], "<f4").tobytes()}, "base loss: -1 said, expected 0 to 2303"),
    ({"losses": np.array([1, 1e30, 0], "<f4").tobytes()}, "differences: of size 7.071e+29, expected at most 2303"),
    ({"samples": 10**9}, "samples: 1000000000 said, 20 declared when it joined"),
]


@pytest.mark.parametrize(("changes", "why"), LIES)
def test_reply_that_cannot_be_true_is_refused_named_and_replaced_at_once(changes: dict[str, Any], why: str) -> None:
    stage, sent = full(rest_rounds=4)
    ack, *others = stage.answer(sent[0], **changes)
    assert ack == (sent[0].name, sent[0].instance, Ack(RUN, 1, why))
    assert len(asked(others)) == 1
    assert stage.conductor.refused == {why.partition(":")[0]: 1}
    number = stage.conductor.devices[sent[0].name].number
    assert stage.said == [f"{sent[0].name} (device {number}): its answer to round 1 is refused: {why}"]
    # It gets no second try, not even as another process, and rests in the rounds to come.
    assert stage.answer(sent[0])[0].message == Ack(RUN, 1, "refused before")
    assert asked(stage.join(sent[0].name, life=1)) == set()
    for send in [*sent[1:], *orders(others)]:
        stage.answer(send)
    assert not stage.conductor.late
    stage.close()
    assert stage.state(sent[0].name) == "resting"
    assert stage.conductor.devices[sent[0].name].rests_until == 2 + 4


def test_round_of_all_goes_on_without_a_device_whose_answer_is_refused() -> None:
    stage, sent = full(devices=6, per_round=3, sample="all")
    for send in sent[1:]:
        stage.answer(send)
    assert not stage.conductor.complete
    stage.answer(sent[0], losses=NAN)
    assert stage.conductor.complete
    assert not stage.conductor.late


@pytest.mark.parametrize("sample", ["all", "present"])
def test_round_whose_answers_are_all_refused_is_asked_again(sample: str) -> None:
    stage, sent = full(devices=6, per_round=6, sample=sample)
    again = [send for order in sent for send in stage.answer(order, losses=NAN)]
    if sample == "present":
        assert asked(again) == set()
        again = stage.wait(61)
    assert asked(again) == set("abcdef")
    for send in orders(again):
        stage.answer(send)
    assert stage.conductor.complete


def test_round_says_for_whom_it_waits_and_since_when() -> None:
    stage = Stage(devices=3, per_round=3, sample="present")
    stage.conductor.open(stage.now)
    stage.wait(20)
    assert stage.conductor.waiting_for(stage.now).endswith("for devices to join, for 20 s (no device has joined)")
    stage = Stage(devices=3, per_round=3, sample="all")
    stage.open()
    stage.join("a", 0)
    stage.join("b", 2)
    stage.leave("b")
    stage.wait(35)
    assert stage.conductor.waiting_for(stage.now) == (
        "round 1: waiting for 35 s for a (device 0, asked 35 s ago); device 1 (nobody has joined with this number); "
        "b (device 2, gone, last seen 35 s ago)"
    )


def test_samples_declared_anew_are_told_and_counted() -> None:
    stage, _ = full()
    stage.say("a", Ready(RUN, 0, 10**9))
    assert stage.said == ["a (device 0): declares 1000000000 samples now, and 20 before"]
    assert stage.conductor.refused == {"samples declared anew": 1}


def test_what_is_not_of_this_fleet_changes_nothing_and_is_counted() -> None:
    stage, sent = full()
    assert isinstance(sent[0].message, OrderMessage)
    reply = answer_to(sent[0].message)
    name, before = sent[0].name, {n: asdict(d) for n, d in stage.conductor.devices.items()}
    for data in (b"", b"\xff" * 40, encode(sent[0].message), encode(Leave("go")), encode(reply) + b"\0"):
        assert stage.conductor.receive(name, sent[0].instance, data, stage.now) == []
    assert stage.conductor.presence(name, encode(reply), stage.now) == []
    assert stage.say(name, reply, life=1) == []
    assert stage.say("stranger", reply) == []
    assert {n: asdict(d) for n, d in stage.conductor.devices.items()} == before
    for message in (reply, Ready(RUN, 0, 5), Fetch(RUN, PROGRAM, 0, 0)):
        assert stage.say(name, message._replace(run=b"another!"[: len(message.run)])) == []
    assert stage.coordinator.replies == ()
    assert stage.conductor.refused == {"malformed": 6, "wrong instance": 1, "unknown name": 1, "foreign run": 3}


def test_devices_of_another_version_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = full()
    monkeypatch.setattr(messages, "VERSION", 1)
    join, presence = encode(Join(ANY_NUMBER)), encode(Presence(bytes(4), True))
    monkeypatch.undo()
    for name in ("old", "old", "older", "not a name"):
        assert stage.conductor.receive(name, instance_of("old"), join, stage.now) == []
    assert stage.conductor.presence("gone", presence, stage.now) == []
    assert stage.conductor.not_understood == dict.fromkeys(
        ["old", "older"], "message version 1, this foreseed speaks 4"
    )
    assert stage.conductor.refused == {"other version": 5}


def test_order_goes_out_once_and_again_only_to_who_is_ready_again() -> None:
    stage, sent = full()
    assert len(sent) == 3
    assert orders(stage.wait(1)) == []
    assert stage.say(sent[0].name, Ready(RUN, NOTHING_HELD, 20)) == [sent[0]]
    stage.answer(sent[0])
    assert orders(stage.say(sent[0].name, Ready(RUN, NOTHING_HELD, 20))) == []
    assert stage.state(sent[0].name) == "answered"
    bystander = next(name for name in "abcdef" if name not in asked(sent))
    assert stage.say(bystander, Ready(RUN, 0, 20)) == []
    assert stage.state(bystander) == "ready"


def test_order_brings_what_the_device_says_it_missed() -> None:
    stage, sent = full(per_round=6)
    for _ in range(3):
        for send in sent:
            stage.answer(send)
        sent = orders(stage.close())
    for send in sent:
        assert isinstance(send.message, OrderMessage)
        assert [update.round for update in send.message.updates] == [3]
    (again,) = orders(stage.say("a", Ready(RUN, 1, 20)))
    assert isinstance(again.message, OrderMessage)
    assert [update.round for update in again.message.updates] == [2, 3]
    assert again.message.values_hash == values_hash(stage.coordinator.state.values)
    assert stage.conductor.devices["a"].held == 1


def test_table_counts_the_payload_of_every_device() -> None:
    stage, sent = full()
    device = stage.conductor.devices[sent[0].name]
    up, down = device.payload_up, device.payload_down
    assert up == len(encode(Join(ANY_NUMBER))) + len(encode(Ready(RUN, 0, 20)))
    stage.now += 3
    acknowledged = stage.answer(sent[0])
    assert isinstance(sent[0].message, OrderMessage)
    assert device.payload_up == up + len(encode(answer_to(sent[0].message)))
    assert device.payload_down == down + len(encode(acknowledged[0].message))
    assert device.last_seen == stage.now


def test_device_that_comes_back_has_to_say_ready_before_it_is_asked() -> None:
    stage = Stage()
    stage.join("a")
    assert stage.state("a") == "ready"
    stage.leave("a")
    assert stage.state("a") == "gone"
    back = Presence(bytes.fromhex(instance_of("a")), True)
    assert stage.conductor.presence("a", encode(back), stage.now) == []
    assert stage.state("a") == "joining"
    stage.open()
    assert orders(stage.wait(1000)) == []
    assert asked(stage.say("a", Ready(RUN, 0, 20))) == {"a"}


# --- what is lost in a cluster ---


def welcomed(sends: list[Send]) -> list[str]:
    return [send.name for send in sends if isinstance(send.message, Welcome)]


@pytest.mark.parametrize("sample", ["all", "present"])
def test_a_silent_device_is_welcomed_again_ever_more_rarely_and_gets_its_order_when_it_is_ready(sample: str) -> None:
    stage = Stage(devices=1, per_round=1, sample=sample, deadline=10_000.0)
    stage.join("a")
    (lost,) = orders(stage.open())
    seconds = [second for second in range(1, 1000) if welcomed(stage.wait(1.0))]
    assert seconds == [30, 90, 210, 450, 930]
    (again,) = orders(stage.say("a", Ready(RUN, 0, SAMPLES)))
    assert again == lost
    # Who has said something is not bothered for a while.
    assert [second for second in range(1, 100) if welcomed(stage.wait(1.0))] == [30, 90]
    stage.answer(again)
    assert stage.conductor.complete


def test_a_device_whose_ready_was_lost_is_welcomed_again() -> None:
    stage = Stage(devices=1, per_round=1, sample="all")
    stage.open()
    stage.say("a", Join(ANY_NUMBER))
    assert [second for second in range(1, 100) if welcomed(stage.wait(1.0))] == [30, 90]


def test_a_device_that_is_said_to_be_gone_is_asked_whether_it_is() -> None:
    """The will of its old connection may come, from another node, when the device is back already."""
    stage, sent = full(per_round=6, sample="all")
    name = sent[0].name
    assert welcomed(stage.leave(name)) == [name]
    assert stage.state(name) == "gone"
    assert orders(stage.say(name, Ready(RUN, 0, SAMPLES))) == [sent[0]]

"""Rounds under faults: when they start, whom they ask, when they end, and who rests."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from foreseed.methods.ntk_baffle import learn
from foreseed.wire import Ready
from tests.fleet.stage import RUN, Stage, answer_to, asked, coordinator_for, full, orders

FOREVER = 10**6


# --- the start ---


def test_round_starts_as_soon_as_enough_devices_are_ready() -> None:
    stage = Stage(extra=1)
    assert stage.open() == []
    for name in "abc":
        assert asked(stage.join(name)) == set()
    stage.now += 2
    sent = orders(stage.join("d"))
    assert asked(sent) == set("abcd")
    assert all(stage.state(name) == "asked" for name in "abcd")


def test_rounds_do_not_wait_again_for_devices_that_were_not_there_the_last_time() -> None:
    stage = Stage(min_replies=1, gather=10)
    stage.open()
    stage.join("a")
    stage.join("b")
    first = stage.wait(10)
    assert asked(first) == {"a", "b"}
    for send in orders(first):
        stage.answer(send)
    second = orders(stage.close())
    assert asked(second) == {"a", "b"}
    stage.leave("b")
    stage.answer(next(send for send in second if send.name == "a"))
    assert stage.close() == []  # one fewer than the last time: it may be back in a moment
    assert asked(stage.wait(10)) == {"a"}


def test_device_that_is_ready_again_and_again_gets_no_more_time() -> None:
    stage, first = full(per_round=2, min_replies=2, deadline=60)
    stage.answer(first[0])
    for _ in range(5):
        assert orders(stage.wait(11)) == []
        assert asked(stage.say(first[1].name, Ready(RUN, 0, 20))) == {first[1].name}
    (other,) = orders(stage.wait(6))
    assert other.name not in (first[0].name, first[1].name)


def test_after_a_new_connection_nobody_is_here_until_it_joins_again() -> None:
    stage, first = full(per_round=2)
    stage.answer(first[0])
    before = stage.conductor.announce
    stage.conductor.reconnected(b"epoch-no2")
    assert stage.conductor.announce != before
    here = [name for name in "abcdef" if stage.state(name) != "gone"]
    assert here == [first[1].name]  # still at work, for as long as it has
    stage.answer(first[1])
    assert stage.close() == []
    assert asked(stage.join(first[0].name)) == {first[0].name, first[1].name}


def test_round_starts_with_fewer_when_the_time_to_gather_is_over() -> None:
    stage = Stage(min_replies=2, gather=10)
    stage.open()
    stage.join("a")
    assert orders(stage.wait(9)) == []
    stage.join("b")
    assert orders(stage.wait(0.5)) == []
    assert asked(stage.wait(1)) == {"a", "b"}


def test_round_never_starts_with_fewer_than_min_replies() -> None:
    stage = Stage(min_replies=2)
    stage.open()
    stage.join("a")
    assert orders(stage.wait(FOREVER)) == []
    assert not stage.conductor.complete
    assert asked(stage.join("b")) == {"a", "b"}


def test_fleet_smaller_than_per_round_and_extra_is_not_waited_for() -> None:
    stage = Stage(devices=3, per_round=3, extra=5)
    stage.open()
    sent = [send for name in "abc" for send in stage.join(name)]
    assert asked(sent) == set("abc")


def test_nobody_is_asked_between_rounds() -> None:
    stage, sent = full()
    for send in sent:
        stage.answer(send)
    assert stage.conductor.complete
    learn(stage.coordinator)
    assert not stage.conductor.complete
    assert orders(stage.wait(FOREVER)) == []
    assert asked(stage.join("a")) == set()


# --- the end ---


def test_round_is_complete_when_nothing_is_missing() -> None:
    stage, sent = full()
    for send in sent:
        assert not stage.conductor.complete
        stage.answer(send)
    assert stage.conductor.complete
    assert orders(stage.wait(FOREVER)) == []
    assert orders(stage.say(sent[0].name, Ready(RUN, 0, 20))) == []


def test_round_with_extra_closes_with_the_first_replies_and_blames_nobody() -> None:
    stage, sent = full(extra=2)
    assert len(sent) == 5
    for send in sent[:3]:
        stage.answer(send)
    assert stage.conductor.complete
    assert stage.say(sent[4].name, Ready(RUN, 0, 20)) == []
    (late,) = stage.answer(sent[3])
    assert late.message.refused == "not needed any more"  # type: ignore[union-attr]
    stage.close()
    assert all(device.failures == 0 for device in stage.conductor.devices.values())


def test_round_closes_at_its_deadline_with_enough_replies() -> None:
    stage, sent = full(min_replies=2)
    stage.answer(sent[0])
    stage.answer(sent[1])
    assert orders(stage.wait(59.9)) == []
    assert not stage.conductor.complete
    assert orders(stage.wait(0.2)) == []
    assert stage.conductor.complete
    closed = learn(stage.coordinator)
    assert len(closed.replies) == 2


def test_others_are_asked_at_a_deadline_with_too_few_replies_and_all_replies_count() -> None:
    stage, sent = full(min_replies=2)
    stage.answer(sent[0])
    others = orders(stage.wait(60))
    assert len(others) == 2
    assert asked(others).isdisjoint(asked(sent))
    assert not stage.conductor.complete
    # A straggler counts as well as a replacement.
    stage.answer(sent[1])
    assert not stage.conductor.complete
    stage.answer(others[0])
    assert stage.conductor.complete
    devices = {send.message.device for send in (sent[0], sent[1], others[0])}
    assert {reply.device for reply in learn(stage.coordinator).replies} == devices


def test_new_deadline_closes_the_round_too() -> None:
    stage, sent = full(min_replies=2)
    stage.answer(sent[0])
    others = orders(stage.wait(60))
    stage.answer(others[0])
    stage.wait(59)
    assert not stage.conductor.complete
    stage.wait(1)
    assert stage.conductor.complete


def test_round_without_anyone_left_to_ask_waits_for_those_who_come_back() -> None:
    stage, sent = full(per_round=6, min_replies=6)
    for send in sent[:5]:
        stage.answer(send)
    slow = sent[5].name
    for _ in range(5):
        assert orders(stage.wait(60)) == []
    assert not stage.conductor.complete
    assert orders(stage.leave(slow)) == []
    assert asked(stage.join(slow, life=1)) == {slow}
    stage.answer(sent[5]._replace(instance=stage.conductor.devices[slow].instance))
    assert stage.conductor.complete


def test_without_a_deadline_a_slow_device_is_waited_for() -> None:
    stage, sent = full(deadline=0.0)
    stage.answer(sent[0])
    stage.answer(sent[1])
    assert orders(stage.wait(FOREVER)) == []
    assert not stage.conductor.complete
    stage.answer(sent[2])
    assert stage.conductor.complete


# --- devices that vanish ---


def test_device_that_vanishes_is_replaced_at_once_and_by_one_only() -> None:
    stage, sent = full()
    replacement = orders(stage.leave(sent[0].name))
    assert len(replacement) == 1
    assert asked(replacement).isdisjoint(asked(sent))
    assert orders(stage.wait(1)) == []
    for send in (sent[1], sent[2], replacement[0]):
        stage.answer(send)
    stage.close()
    failed = {name for name, device in stage.conductor.devices.items() if device.failures}
    assert failed == {sent[0].name}


def test_extra_devices_stand_in_for_those_that_vanish() -> None:
    stage, sent = full(extra=1)
    assert asked(stage.leave(sent[0].name)) == set()
    assert len(asked(stage.leave(sent[1].name))) == 1


def test_device_that_answered_may_leave() -> None:
    stage, sent = full()
    stage.answer(sent[0])
    assert orders(stage.leave(sent[0].name)) == []
    stage.answer(sent[1])
    stage.answer(sent[2])
    assert stage.conductor.complete
    assert sent[0].message.device in {reply.device for reply in stage.coordinator.replies}  # type: ignore[union-attr]


def test_newcomer_is_asked_in_a_round_that_started_with_too_few() -> None:
    stage = Stage(gather=10)
    stage.open()
    stage.join("a")
    assert asked(stage.wait(10)) == {"a"}
    assert asked(stage.join("b")) == {"b"}


def test_round_ends_when_all_that_are_left_have_answered() -> None:
    stage, sent = full(per_round=6, min_replies=4)
    for send in sent[:3]:
        stage.answer(send)
    stage.leave(sent[3].name)
    stage.leave(sent[4].name)
    assert not stage.conductor.complete
    stage.answer(sent[5])
    assert stage.conductor.complete


def test_replacement_has_its_own_time_to_answer() -> None:
    stage, sent = full(min_replies=1)
    stage.answer(sent[0])
    stage.now += 59
    (replacement,) = orders(stage.leave(sent[1].name))
    stage.wait(1)
    assert stage.conductor.complete
    stage.close()
    failures = {name: device.failures for name, device in stage.conductor.devices.items()}
    assert failures[replacement.name] == 0
    assert failures[sent[1].name] == failures[sent[2].name] == 1


# --- resting ---


def gathered(names: str = "abcdef", **settings: Any) -> Stage:
    """A fleet that is ready for its first round."""
    stage = Stage(devices=len(names), **settings)
    for name in names:
        stage.join(name)
    return stage


def hold(stage: Stage, failing: str, rounds: int = 1) -> list[set[str]]:
    """Hold rounds in which some devices never answer; returns who was asked in each."""
    history = []
    for _ in range(rounds):
        sent = orders(stage.open())
        history.append(asked(sent))
        while not stage.conductor.complete:
            for send in sent:
                if send.name not in failing:
                    stage.answer(send)
            sent = orders(stage.wait(60))
            history[-1] |= asked(sent)
        learn(stage.coordinator)
    return history


def test_device_that_keeps_failing_rests_ever_longer() -> None:
    stage = gathered(per_round=6, min_replies=5, rest_after=3, rest_rounds=4)
    history = hold(stage, "a", 200)
    tried = [round for round, names in enumerate(history, 1) if "a" in names]
    # Rests of 4, 8, 16, 32 and 64 rounds, and no longer ones.
    assert tried == [1, 2, 3, 8, 17, 34, 67, 132, 197]
    assert all(set("bcdef") <= names for names in history)


def test_answer_makes_up_for_earlier_failures() -> None:
    stage = gathered(per_round=6, min_replies=5, rest_after=3, rest_rounds=4)
    for _ in range(4):
        assert all("a" in names for names in [*hold(stage, "a", 2), *hold(stage, "")])
    assert stage.conductor.devices["a"].failures == 0


def test_rested_device_that_answers_is_as_good_as_any() -> None:
    stage = gathered(per_round=6, min_replies=5, rest_after=1, rest_rounds=2)
    assert ["a" in names for names in hold(stage, "a", 4)] == [True, False, False, True]
    assert ["a" in names for names in hold(stage, "", 5)] == [False] * 4 + [True]
    assert ["a" in names for names in hold(stage, "a", 4)] == [True, False, False, True]


def test_leaving_a_round_for_good_is_a_failure_and_coming_back_with_an_answer_is_none() -> None:
    stage = gathered(per_round=6)
    sent = {send.name: send for send in orders(stage.open())}
    for name in "ab":
        stage.leave(name)
        stage.join(name)
    for name in "acdef":
        stage.answer(sent[name])
    stage.wait(60)
    stage.close()
    assert {name: device.failures for name, device in stage.conductor.devices.items()} == {
        **dict.fromkeys("acdef", 0),
        "b": 1,
    }


def test_nobody_waits_for_a_device_that_rests() -> None:
    stage = gathered(per_round=6, min_replies=5, rest_after=1)
    hold(stage, "a")
    assert asked(stage.open()) == set("bcdef")
    assert stage.state("a") == "resting"
    assert stage.say("a", Ready(RUN, 0, 20)) == []
    assert stage.state("a") == "resting"


def test_resting_devices_are_woken_where_too_few_others_are_left() -> None:
    stage = gathered("abc", per_round=3, min_replies=1, rest_after=1)
    hold(stage, "ab")
    stage.leave("c")
    assert stage.open() == []
    assert stage.state("a") == stage.state("b") == "resting"
    assert asked(stage.wait(10)) == {"a", "b"}


def test_resting_device_is_woken_when_the_last_one_awake_fails() -> None:
    stage = gathered("ab", per_round=2, min_replies=1, rest_after=1)
    hold(stage, "a")
    assert asked(stage.open()) == {"b"}
    assert asked(stage.leave("b")) == {"a"}


# --- a fleet of which a third vanishes ---


@pytest.mark.parametrize("told", [True, False], ids=["with a will", "silently"])
@pytest.mark.parametrize(("devices", "per_round"), [(20, 5), (10, 10)])
def test_run_finishes_promptly_while_a_third_vanishes_in_every_round(devices: int, per_round: int, told: bool) -> None:
    chance, rounds = random.Random(1), 60
    stage = Stage(devices, per_round, gather=2.0, deadline=20.0)
    lives = dict.fromkeys((f"d{i}" for i in range(devices)), 0)
    for name in lives:
        stage.join(name)
    began = stage.now
    for _ in range(rounds):
        sent = orders(stage.open())
        away: set[str] = set()
        while not stage.conductor.complete:
            stage.now += 1
            victims = [name for name in asked(sent) if chance.random() < 0.3]
            away |= set(victims)
            replies = [send for send in sent if send.name not in away]
            sent = [send for name in victims if told for send in orders(stage.leave(name, lives[name]))]
            for send in replies:
                sent += orders(stage.answer(send))
            sent += orders(stage.wait())
        learn(stage.coordinator)
        for name in away:
            lives[name] += 1
            stage.join(name, life=lives[name])
    assert stage.coordinator.state.round == rounds
    # Answers take a second; with a will no round waits for anything else for long.
    assert (stage.now - began) / rounds < (4 if told else 22)


# --- all ---


def test_with_sample_all_absent_devices_are_asked_and_waited_for() -> None:
    stage = Stage(per_round=6, sample="all", deadline=5.0, extra=3, min_replies=1, rest_after=1)
    stage.join("a")
    sent = orders(stage.open())
    assert asked(sent) == {"a"}
    stage.answer(sent[0])
    for name in "bcdef":
        assert orders(stage.wait(FOREVER)) == []
        assert not stage.conductor.complete
        (send,) = orders(stage.join(name))
        assert orders(stage.leave(name)) == []
        (again,) = orders(stage.join(name, life=1))
        assert again.message == send.message
        stage.answer(again)
    assert stage.conductor.complete
    stage.close()
    assert all(stage.state(name) == "asked" for name in "abcdef")


def test_with_sample_all_the_run_is_the_simulators_to_the_bit() -> None:
    chance = random.Random(2)
    stage, plain = Stage(sample="all"), coordinator_for(6, 3)
    lives = dict.fromkeys("abcdef", 0)
    for number, name in enumerate(lives):
        stage.join(name, wanted=number)
    for _ in range(30):
        for order in plain.open():
            plain.receive(answer_to(order))
        learn(plain)
        sent = orders(stage.open())
        while not stage.conductor.complete:
            stage.wait(100)
            name = chance.choice(list(lives))
            stage.leave(name, lives[name])
            lives[name] += 1
            sent = [send for send in sent if send.name != name] + orders(stage.join(name, life=lives[name]))
            if sent:
                stage.answer(sent.pop(chance.randrange(len(sent))))
        learn(stage.coordinator)
    assert stage.coordinator.state.round == 30
    np.testing.assert_array_equal(stage.coordinator.state.values, plain.state.values)
    np.testing.assert_array_equal(stage.coordinator.state.buffers, plain.state.buffers)

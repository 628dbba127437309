"""Replies that cannot be true: by their order, by what their device declared, by what the last rounds were like."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.coordinator import Coordinator, Optimiser, Rules
from foreseed.coordinator.plausible import HOPELESS, LARGER, MORE, ROUNDS, WORSE
from foreseed.methods.ntk_baffle import learn
from foreseed.wire import RUN_TAG, OrderMessage, Reply

RULES = Rules(b"run-name", 3, devices=4, per_round=4, k=8, sigma=1e-3, robust="clip", max_share=0.5, classes=10)
N = 60


def start(rules: Rules = RULES) -> Coordinator:
    return Coordinator.start(rules, Optimiser(lr=0.1), np.random.default_rng(1).normal(size=N))


def honest(order: OrderMessage, loss: float = 2.0, size: float = 1.0) -> Reply:
    rng = np.random.default_rng([order.round, order.device])
    signs = np.sign(rng.normal(size=order.k))
    losses = np.append(loss, size * order.sigma * signs).astype("<f4").tobytes()
    return Reply(order.run[:RUN_TAG], order.round, order.device, 30, losses)


def play(coordinator: Coordinator, rounds: int, loss: float = 2.0) -> None:
    for _ in range(rounds):
        for order in coordinator.open():
            assert coordinator.receive(honest(order, loss)) is None
        learn(coordinator)


def verdict(coordinator: Coordinator, **changes: Any) -> str | None:
    """What the coordinator says of one reply, in a round of its own."""
    kept = {key: value for key, value in changes.items() if key in ("loss", "size")}
    fields = {key: value for key, value in changes.items() if key not in kept}
    return coordinator.receive(honest(coordinator.open()[0], **kept)._replace(**fields))


def test_losses_and_differences_are_held_to_what_a_model_of_so_many_classes_can_have() -> None:
    coordinator, most = start(), HOPELESS * log(10)
    assert verdict(coordinator, loss=0.999 * most) is None
    assert verdict(coordinator, loss=1.001 * most) == "base loss: 2305 said, expected 0 to 2303"
    assert verdict(coordinator, loss=-1e-3) == "base loss: -0.001 said, expected 0 to 2303"
    assert verdict(coordinator, size=0.999 * most / RULES.sigma) is None
    said = verdict(coordinator, size=1.001 * most / RULES.sigma)
    assert said == "differences: of size 2305, expected at most 2303"


def test_later_they_are_held_to_the_rounds_before() -> None:
    coordinator = start()
    play(coordinator, 3, loss=4.0)
    assert verdict(coordinator, loss=0.99 * WORSE * 4.0) is None
    assert verdict(coordinator, loss=1.01 * WORSE * 4.0) == "base loss: 80.8 said, expected 0 to 80"
    assert verdict(coordinator, size=0.99 * LARGER) is None
    assert verdict(coordinator, size=1.01 * LARGER) == "differences: of size 0.101, expected at most 0.1"
    # Who has learnt nearly everything may still meet a device that guesses.
    play(coordinator, ROUNDS, loss=0.01)
    assert verdict(coordinator, loss=0.99 * WORSE * log(10)) is None


def test_one_bad_round_does_not_decide_what_is_usual() -> None:
    coordinator = start()
    play(coordinator, 3)
    (order, *_) = coordinator.open()
    assert coordinator.receive(honest(order, size=0.9 * LARGER)) is None
    learn(coordinator)
    assert verdict(coordinator, size=2 * LARGER) is not None
    assert len(coordinator.state.recent) == 4
    play(coordinator, ROUNDS)
    assert len(coordinator.state.recent) == ROUNDS


def test_without_a_rule_only_the_samples_are_checked() -> None:
    coordinator = start(replace(RULES, robust="none"))
    assert verdict(coordinator, loss=1e30) is None
    assert verdict(coordinator, size=1e30) is None
    coordinator.declared[coordinator.open()[0].device] = 31
    assert verdict(coordinator) == "samples: 30 said, 31 declared when it joined"


def test_samples_are_those_that_were_declared() -> None:
    coordinator = start()
    coordinator.declared[coordinator.open()[0].device] = 31
    assert verdict(coordinator) == "samples: 30 said, 31 declared when it joined"
    assert verdict(coordinator, samples=31) is None


def test_samples_that_no_other_device_comes_near_are_refused() -> None:
    coordinator = start()
    play(coordinator, 2)
    most = int(MORE) * 30
    assert verdict(coordinator, samples=most) is None
    said = verdict(coordinator, samples=most + 1)
    assert said == "samples: 30001 said, expected at most 30000"


def test_refused_replies_are_counted_by_kind() -> None:
    coordinator = start()
    for loss in (1e10, 1e20):
        verdict(coordinator, loss=loss)
    assert coordinator.refused == {"base loss": 2}


@settings(deadline=None)
@given(st.permutations(range(4)), st.floats(1e-3, 1e3))
def test_a_round_comes_to_the_same_whatever_the_order_of_its_replies(order: list[int], size: float) -> None:
    values = []
    for arrival in (range(4), order):
        coordinator = start()
        play(coordinator, 1)
        orders = coordinator.open()
        for at in arrival:
            coordinator.receive(honest(orders[at], size=size if at == 0 else 1.0))
        learn(coordinator)
        values.append(coordinator.state.values.tobytes())
    assert values[0] == values[1]


@pytest.mark.parametrize("liars", [1, 2])
def test_one_liar_moves_a_round_by_little_and_never_ends_a_run(liars: int) -> None:
    """Finite replies of 1e30 ended runs once: values grew until no honest device could answer."""
    plain, lied_to = start(), start()
    for _ in range(5):
        for coordinator in (plain, lied_to):
            for order in coordinator.open():
                lie = coordinator is lied_to and order.device < liars
                refused = coordinator.receive(honest(order, size=1e30 if lie else 1.0))
                assert (refused is not None) == lie
            learn(coordinator)
    assert np.abs(lied_to.state.values - plain.state.values).max() < 10

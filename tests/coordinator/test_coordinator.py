"""The coordinator: what a round does to the values, what it refuses, and how devices catch up."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.coordinator import Coordinator, Optimiser, Rules
from foreseed.coordinator.answers import differences
from foreseed.coordinator.coordinator import MAX_UPDATES_BYTES
from foreseed.engine import SHARED_DEVICE, Directions, ForeseedError, direction
from foreseed.engine.update import replay
from foreseed.methods.descent import NotFiniteError
from foreseed.methods.ntk_baffle import Learnt, learn
from foreseed.wire import NOTHING_HELD, RUN_TAG, OrderMessage, Reply, decode, encode, values_hash
from foreseed.wire.messages import MAX_DIRECTIONS

N = 1500
PLAIN = Optimiser(lr=1.0, momentum=0.0)
RULES = Rules(b"run-name", seed=2**40 + 7, devices=6, per_round=3, k=4, sigma=1e-3)


def start(rules: Rules = RULES, optimiser: Optimiser = PLAIN, n: int = N, stats: Sequence[float] = ()) -> Coordinator:
    return Coordinator.start(rules, optimiser, np.random.default_rng(1).normal(size=n), stats)


def reply_to(order: OrderMessage, samples: int = 0, stats: bytes = b"") -> Reply:
    """What a device might answer: sensible numbers that depend on who is asked and when."""
    rng = np.random.default_rng([order.round, order.device])
    losses = np.append(rng.uniform(1, 3), order.sigma * rng.normal(size=order.k * order.local_steps))
    n = samples or int(rng.integers(5, 50))
    return Reply(order.run[:RUN_TAG], order.round, order.device, n, losses.astype("<f4").tobytes(), stats)


def play(coordinator: Coordinator, rounds: int = 1) -> Learnt:
    for _ in range(rounds):
        for order in coordinator.open():
            assert coordinator.receive(reply_to(order)) is None
        closed = learn(coordinator)
    return closed


def estimate(replies: Sequence[Reply], rules: Rules = RULES) -> np.ndarray:
    """Eq. 16 as it stands: sum of N_i/N times the mean over k of (ΔL_ik / σ) z_ik."""
    total = sum(reply.samples for reply in replies)
    gradient = np.zeros(N)
    for reply in replies:
        device = SHARED_DEVICE if rules.seeds == "shared" else reply.device
        d = Directions(rules.seed, reply.round, device, count=rules.scalars, kind=rules.kind)
        for k, difference in enumerate(differences(reply, rules)):
            z = np.array(direction(d, k, N), np.float64)
            gradient += reply.samples / total * difference / rules.sigma * z / rules.k
    return gradient


# --- the estimate and the step ---


@pytest.mark.parametrize("seeds", ["per-device", "shared"])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_round_steps_along_the_weighted_estimate_of_eq_16(seeds: Any, kind: Any, local_steps: int) -> None:
    rules = replace(RULES, seeds=seeds, kind=kind, local_steps=local_steps)
    coordinator = start(rules)
    before = coordinator.state.values.astype(np.float64)
    replies = [reply_to(order) for order in coordinator.open()]
    assert len({reply.samples for reply in replies}) > 1
    for reply in reversed(replies):
        assert coordinator.receive(reply) is None
    closed = learn(coordinator)
    expected = estimate(replies, rules)
    np.testing.assert_allclose(before - coordinator.state.values, expected, atol=1e-6 * np.abs(expected).max())
    total = sum(reply.samples for reply in replies)
    assert closed.samples == total
    assert closed.base_loss == pytest.approx(sum(r.samples * r.base_loss for r in replies) / total)
    assert [reply.device for reply in closed.replies] == sorted(reply.device for reply in replies)


def test_update_has_a_part_for_each_device_or_one_for_all() -> None:
    apart, together = play(start()), play(start(replace(RULES, seeds="shared")))
    assert [device for device, _ in apart.update.parts] == [reply.device for reply in apart.replies]
    assert [device for device, _ in together.update.parts] == [SHARED_DEVICE]
    # The same numbers: what is one sum on the wire is the sum of the devices' own.
    np.testing.assert_allclose(
        np.frombuffer(together.update.parts[0][1], "<f4"),
        np.sum([np.frombuffer(c, "<f4") for _, c in apart.update.parts], axis=0),
        rtol=1e-5,
    )


def test_only_devices_that_answered_count() -> None:
    coordinator = start()
    before = coordinator.state.values.astype(np.float64)
    replies = [reply_to(order) for order in coordinator.open()][1:]
    for reply in replies:
        coordinator.receive(reply)
    learn(coordinator)
    expected = estimate(replies)
    np.testing.assert_allclose(before - coordinator.state.values, expected, atol=1e-6 * np.abs(expected).max())


def test_mean_loss_is_rounded_once_whatever_python_adds_with() -> None:
    # The built-in sum loses the 1, with the compensation of Python 3.12 as without.
    losses = [2.0**120, 2.0**60, 1.0, -(2.0**120), -(2.0**60)]
    assert sum(losses) != 1
    coordinator = start(replace(RULES, per_round=len(losses)))
    for loss, order in zip(losses, coordinator.open(), strict=True):
        numbers = array("f", [loss, *differences(reply_to(order), RULES)])
        assert coordinator.receive(reply_to(order, samples=2)._replace(losses=numbers.tobytes())) is None
    assert learn(coordinator).base_loss == 1 / len(losses)


def test_round_without_replies_cannot_be_closed_and_goes_on() -> None:
    coordinator = start()
    orders = coordinator.open()
    with pytest.raises(ForeseedError, match="has no replies to learn from"):
        learn(coordinator)
    assert coordinator.receive(reply_to(orders[0])) is None
    assert learn(coordinator).update.round == 1


def expected_steps(optimiser: Optimiser, w: np.ndarray, gradients: Sequence[np.ndarray]) -> np.ndarray:
    """The textbook's optimisers, in float64."""
    v, m, s = (np.zeros_like(w) for _ in range(3))
    for t, gradient in enumerate(gradients, 1):
        lr, g = optimiser.lr * optimiser.lr_decay ** (t - 1), gradient + optimiser.weight_decay * w
        if optimiser.kind == "sgd":
            v = optimiser.momentum * v + g
            w = w - lr * v
        else:
            m = optimiser.beta1 * m + (1 - optimiser.beta1) * g
            s = optimiser.beta2 * s + (1 - optimiser.beta2) * g**2
            w = w - lr * (m / (1 - optimiser.beta1**t)) / (np.sqrt(s / (1 - optimiser.beta2**t)) + optimiser.eps)
    return w


@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser("sgd", 0.05, 0.0, 0.1, 0.9),
        Optimiser("sgd", 0.05, 0.9, 0.1, 0.9),
        Optimiser("adam", 0.05, 0.0, 0.1, 0.9),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_rounds_follow_the_optimiser(optimiser: Optimiser) -> None:
    coordinator = start(optimiser=optimiser)
    before = coordinator.state.values.astype(np.float64)
    closed = [play(coordinator) for _ in range(4)]
    expected = expected_steps(optimiser, before, [estimate(c.replies) for c in closed])
    np.testing.assert_allclose(coordinator.state.values, expected, atol=2e-5)
    assert [c.lr for c in closed] == pytest.approx([0.05, 0.045, 0.0405, 0.03645])
    assert len(coordinator.state.buffers) == optimiser.n_buffers


@pytest.mark.parametrize("seeds", ["per-device", "shared"])
def test_clip_bounds_the_norm_and_keeps_the_direction(seeds: Any) -> None:
    free, clipped = start(replace(RULES, seeds=seeds)), start(replace(RULES, seeds=seeds, clip=0.5))
    loose = start(replace(RULES, seeds=seeds, clip=1e6))
    before = free.state.values.copy()
    for coordinator in (free, clipped, loose):
        play(coordinator)
    whole, short = before - free.state.values, before - clipped.state.values
    assert np.linalg.norm(whole) > 1
    assert np.linalg.norm(short) == pytest.approx(0.5, rel=1e-5)
    np.testing.assert_allclose(short, whole * (0.5 / np.linalg.norm(whole)), atol=1e-6)
    np.testing.assert_array_equal(loose.state.values, free.state.values)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_closing_with_many_threads_gives_the_same_bits(clip: float) -> None:
    rules, n = replace(RULES, clip=clip), 20_000
    alone, shared_out = start(rules, n=n), start(rules, n=n)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            play(alone)
            for order in shared_out.open():
                shared_out.receive(reply_to(order))
            learn(shared_out, pool.map)
    np.testing.assert_array_equal(alone.state.values, shared_out.state.values)


def test_statistics_are_the_weighted_mean_of_the_last_round() -> None:
    coordinator = start(stats=[0, 0, 1, 1])
    orders = coordinator.open()
    for i, order in enumerate(orders):
        stats = np.array([i, 2 * i, 3, 4], "<f4").tobytes()
        assert coordinator.receive(reply_to(order, samples=i + 1, stats=stats)) is None
    learn(coordinator)
    np.testing.assert_allclose(coordinator.state.stats, [8 / 6, 16 / 6, 3, 4], rtol=1e-6)


# --- sampling ---


def asked(coordinator: Coordinator, present: Sequence[int] | None = None, extra: int = 0) -> list[int]:
    return [order.device for order in coordinator.open(present, extra)]


def test_sample_is_without_replacement_and_follows_from_seed_and_round() -> None:
    rules = replace(RULES, devices=50, per_round=20)
    one, two, other = start(rules), start(rules), start(replace(rules, seed=rules.seed + 1))
    rounds = []
    for _ in range(5):
        devices = asked(one)
        assert len(set(devices)) == 20
        assert devices == asked(one) == asked(two)
        assert devices != asked(other)
        rounds.append(tuple(devices))
        for coordinator in (one, two, other):
            play(coordinator)
    assert len(set(rounds)) == 5
    assert len(set().union(*rounds)) > 40


def test_every_bit_of_the_seed_counts() -> None:
    rules = replace(RULES, devices=1000, per_round=20)
    samples = [asked(start(replace(rules, seed=seed))) for seed in (1, 1 + 2**32, 1 + 2**63)]
    assert len(set(map(tuple, samples))) == 3


def test_only_those_present_are_asked_in_whatever_order_they_came() -> None:
    rules = replace(RULES, devices=50, per_round=5)
    devices = asked(start(rules), list(range(10, 30)))
    assert set(devices) <= set(range(10, 30))
    assert len(devices) == 5
    assert devices == asked(start(rules), [*range(29, 9, -1), 12, 12])
    assert asked(start(rules), [7, 8]) == [7, 8]
    assert asked(start(rules), []) == []


def test_every_device_is_asked_about_equally_often() -> None:
    coordinator, counts = start(replace(RULES, devices=10, per_round=3, k=1), n=10), Counter[int]()
    for _ in range(400):
        counts.update(asked(coordinator))
        play(coordinator)
    assert len(counts) == 10
    assert all(80 < n < 160 for n in counts.values())


def by_device(replies: Sequence[Reply]) -> tuple[Reply, ...]:
    return tuple(sorted(replies, key=lambda reply: reply.device))


def test_extra_devices_are_asked_and_the_first_replies_count() -> None:
    coordinator = start(replace(RULES, devices=10))
    orders = coordinator.open(extra=2)
    assert len({order.device for order in orders}) == RULES.per_round + 2
    replies = [reply_to(order) for order in reversed(orders)]
    for left, reply in enumerate(replies[:3]):
        assert coordinator.missing == 3 - left
        assert coordinator.receive(reply) is None
    assert coordinator.missing == 0
    assert [coordinator.receive(reply) for reply in replies[3:]] == ["not needed any more"] * 2
    assert coordinator.receive(replies[0]) == "duplicate"
    assert learn(coordinator).replies == by_device(replies[:3])
    assert [coordinator.receive(reply) for reply in replies[3:]] == ["late"] * 2
    assert coordinator.refused == {"not needed any more": 2, "duplicate": 1, "late": 2}


def test_extra_asks_no_more_than_there_are() -> None:
    assert asked(start(), extra=100) == list(range(RULES.devices))
    assert asked(start(), [1, 4], extra=1) == [1, 4]


def test_others_are_asked_for_what_is_missing_and_what_arrived_counts() -> None:
    coordinator = start(replace(RULES, devices=10))
    orders = coordinator.open()
    first = reply_to(orders[0])
    assert coordinator.receive(first) is None
    others = coordinator.ask_others(range(10))
    assert len(others) == coordinator.missing == 2
    assert {order.device for order in others}.isdisjoint(order.device for order in orders)
    assert all(order == coordinator.order(order.device) for order in others)
    assert coordinator.waiting == {order.device for order in (*orders[1:], *others)}
    # Whoever comes first: one of the replaced after all, and one of the others.
    late, other = reply_to(orders[2]), reply_to(others[0])
    assert coordinator.receive(late) is coordinator.receive(other) is None
    assert coordinator.replies == by_device([first, late, other])
    assert coordinator.ask_others(range(10)) == []
    assert learn(coordinator).replies == by_device([first, late, other])
    assert coordinator.waiting == set()
    assert coordinator.replies == ()


def test_only_others_that_are_present_are_asked() -> None:
    coordinator = start(replace(RULES, devices=10))
    first = set(asked(coordinator, range(5)))
    assert {order.device for order in coordinator.ask_others([*first, 7])} == {7}
    assert coordinator.ask_others([*first, 7]) == []
    assert coordinator.waiting == first | {7}


# --- replies that change nothing ---


def test_faulty_replies_change_nothing_and_are_counted() -> None:
    coordinator, clean = start(stats=[0, 1]), start(stats=[0, 1])
    stats = np.array([0.5, 2], "<f4").tobytes()
    for c in (coordinator, clean):
        for order in c.open():
            assert c.receive(reply_to(order, stats=stats)) is None
        learn(c)
    early = reply_to(coordinator.open()[0], stats=stats)
    orders = clean.open()
    good = [reply_to(order, stats=stats) for order in orders]
    stranger = next(i for i in range(RULES.devices) if i not in asked(coordinator))
    nan, inf = (np.array([2, x, 0, 0, 0], "<f4").tobytes() for x in (np.nan, -np.inf))
    bad = {
        "foreign run": [good[0]._replace(run=b"other!!!")],
        "late": [good[0]._replace(round=1)],
        "early": [early._replace(round=3)],
        "unasked device": [good[0]._replace(device=stranger), good[0]._replace(device=10**6)],
        "wrong length": [
            good[0]._replace(losses=good[0].losses + b"\0\0\0\0"),
            good[0]._replace(losses=good[0].losses[:-4]),
            good[0]._replace(stats=b""),
        ],
        "not finite": [
            good[0]._replace(losses=nan),
            good[0]._replace(losses=inf),
            good[0]._replace(stats=np.array([np.inf, 1], "<f4").tobytes()),
        ],
    }
    for reason, replies in bad.items():
        for reply in replies:
            # One that says something of no use costs its device the round; here the round is opened again.
            assert coordinator.receive(reply) == reason
            useless = reason in ("wrong length", "not finite")
            assert coordinator.dismissed == ({reply.device} if useless else set())
            if useless:
                assert coordinator.receive(good[0]) == "refused before"
                assert coordinator.waiting == {order.device for order in orders[1:]}
                coordinator.open()
    for reply in good:
        assert coordinator.receive(reply) is None
        # The first answer holds, whatever comes after it.
        assert coordinator.receive(reply._replace(samples=999)) == "duplicate"
        assert clean.receive(reply) is None
    learn(coordinator)
    learn(clean)
    np.testing.assert_array_equal(coordinator.state.values, clean.state.values)
    np.testing.assert_array_equal(coordinator.state.stats, clean.state.stats)
    counted = {reason: len(replies) for reason, replies in bad.items()}
    assert coordinator.refused == counted | {"duplicate": 3, "refused before": 6}
    assert not clean.refused


def test_reply_before_any_order_is_refused() -> None:
    coordinator = start()
    order = start().open()[0]
    assert coordinator.receive(reply_to(order)) == "unasked device"
    play(coordinator)
    assert coordinator.receive(reply_to(order)) == "late"


# --- not finite ---


@pytest.mark.parametrize("optimiser", [PLAIN, Optimiser(lr=1e38), Optimiser("adam", 1e38)], ids=["sgd", "mom", "adam"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_update_that_is_not_finite_is_refused_and_the_state_kept(optimiser: Optimiser, clip: float) -> None:
    coordinator = start(replace(RULES, clip=clip), optimiser)
    before, buffers = coordinator.state.values.copy(), [b.copy() for b in coordinator.state.buffers]
    orders = coordinator.open()
    for order in orders:
        huge = np.full(1 + RULES.k, 3e38, "<f4").tobytes()
        assert coordinator.receive(reply_to(order)._replace(losses=huge)) is None
    with pytest.raises(NotFiniteError, match=r"not finite; lower train\.lr"):
        learn(coordinator)
    assert coordinator.round == 1
    np.testing.assert_array_equal(coordinator.state.values, before)
    for kept, buffer in zip(coordinator.state.buffers, buffers, strict=True):
        np.testing.assert_array_equal(kept, buffer)
    assert coordinator.log == []
    assert (coordinator.state.last_seen == -1).all()


@pytest.mark.parametrize("key", ["kind", "seeds", "robust"])
def test_unknown_choices_are_refused_at_the_start(key: str) -> None:
    unknown: Any = {key: "cauchy"}
    with pytest.raises(ForeseedError, match=f"{key} 'cauchy' given, expected one of "):
        replace(RULES, **unknown)


def test_more_differences_than_a_reply_holds_are_refused_at_the_start() -> None:
    replace(RULES, k=MAX_DIRECTIONS // 4, local_steps=4)
    with pytest.raises(ForeseedError, match=r"train\.k 16385 x train\.local_steps 4.* lower one of them"):
        replace(RULES, k=MAX_DIRECTIONS // 4 + 1, local_steps=4)


# --- catching up ---


class Device:
    """A device that replays what it missed, and fetches the state where that does not lead to the values."""

    def __init__(self, n: int, n_buffers: int, kind: Any) -> None:
        self.n, self.kind, self.round = n, kind, NOTHING_HELD
        self.vectors = [array("f", bytes(4 * n)) for _ in range(1 + n_buffers)]

    def follow(self, order: OrderMessage, state: bytes) -> str:
        """Come to hold the server's values; returns what it took."""
        # A reply that was lost leaves the server believing that the device holds less than it does.
        missed = [update for update in order.updates if update.round > self.round]
        took = "log" if missed else "nothing"
        if self.round == NOTHING_HELD or self.round + len(missed) != order.round - 1:
            numbers, missed, took = array("f", state), [], "state"
            self.vectors = [numbers[at : at + self.n] for at in range(0, len(numbers), self.n)]
        replay(self.vectors[0], self.vectors[1:], missed, order.seed, self.kind)
        self.round = order.round - 1
        assert values_hash(self.vectors[0]) == order.values_hash
        return took


OPTIMISERS = {
    "sgd": Optimiser(lr=0.01, momentum=0.0, weight_decay=0.01),
    "momentum": Optimiser(lr=0.01, lr_decay=0.99),
    "adam": Optimiser("adam", 0.01, weight_decay=0.01),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize(("seeds", "kind"), [("per-device", "gaussian"), ("shared", "rademacher")])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_devices_that_come_and_go_hold_the_servers_bits(
    optimiser: Optimiser, seeds: Any, kind: Any, clip: float
) -> None:
    n = 160
    rules = replace(RULES, devices=8, per_round=3, seeds=seeds, kind=kind, clip=clip)
    coordinator, took = start(rules, optimiser, n), Counter[str]()
    devices = [Device(n, optimiser.n_buffers, kind) for _ in range(rules.devices)]
    chance = np.random.default_rng(3)
    for _ in range(30):
        for order in coordinator.open():
            received = decode(encode(order))
            assert isinstance(received, OrderMessage)
            lost = chance.random() < 0.2  # an order that never arrives
            if not lost:
                assert coordinator.devices_replay
                took[devices[order.device].follow(received, coordinator.state_bytes())] += 1
                for vector, own in zip(
                    (coordinator.state.values, *coordinator.state.buffers), devices[order.device].vectors, strict=True
                ):
                    assert own.tobytes() == vector.tobytes()
            # Some that were reached do not answer either, or too late.
            if not lost and chance.random() < 0.8:
                coordinator.receive(reply_to(received))
        if coordinator.replies:
            learn(coordinator)
    assert took["log"] > 5
    assert took["state"] > 5


@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("seeds", ["per-device", "shared"])
def test_log_leads_from_any_earlier_round_to_the_servers_bits(optimiser: Optimiser, seeds: Any) -> None:
    coordinator = start(replace(RULES, seeds=seeds, clip=1.0, local_steps=2), optimiser)
    history = []
    for _ in range(6):
        history.append([vector.tobytes() for vector in (coordinator.state.values, *coordinator.state.buffers)])
        play(coordinator)
    now = [vector.tobytes() for vector in (coordinator.state.values, *coordinator.state.buffers)]
    for round, then in enumerate(history):
        vectors = [array("f", vector) for vector in then]
        replay(vectors[0], vectors[1:], coordinator.log[round:], RULES.seed, RULES.kind)
        assert [vector.tobytes() for vector in vectors] == now


@given(
    st.integers(8, 400),
    st.integers(1, 25),
    st.sampled_from(list(OPTIMISERS)),
    st.sampled_from(["per-device", "shared"]),
)
def test_catch_up_is_the_log_where_it_is_cheaper_than_the_state(n: int, rounds: int, name: str, seeds: Any) -> None:
    coordinator = start(replace(RULES, k=2, seeds=seeds), OPTIMISERS[name], n)
    updates = [play(coordinator).update for _ in range(rounds)]
    whole = 4 * n * (1 + len(coordinator.state.buffers))
    for seen in range(NOTHING_HELD, rounds + 1):
        coordinator.holds(0, seen)
        missed = updates[seen:] if seen >= 0 else updates
        cheap = coordinator.devices_replay and seen >= 0 and sum(len(encode(update)) for update in missed) < whole
        assert coordinator.catch_up(0) == (tuple(missed) if cheap else ())
    state = coordinator.state_bytes()
    if coordinator.devices_replay:
        assert len(state) == whole
        assert coordinator.vectors == len(coordinator.state.buffers)
    else:
        assert state == coordinator.state.values.tobytes()
        assert coordinator.vectors == 0
        assert coordinator.log == []


def longest_catch_up(coordinator: Coordinator) -> tuple[int, int]:
    """Rounds of the longest catch-up that an order carries, and the rounds that there were."""
    rounds, lengths = coordinator.state.round, []
    for seen in range(rounds + 1):
        coordinator.holds(0, seen)
        lengths.append(len(coordinator.catch_up(0)))
    longest = max(lengths)
    assert lengths == [0] * (rounds - longest) + list(range(longest, -1, -1))
    return longest, rounds


@pytest.mark.parametrize(("seeds", "per_round"), [("per-device", 3 * 4), ("shared", 4)])
def test_catch_up_makes_no_device_draw_more_numbers_than_the_rules_say(seeds: Any, per_round: int) -> None:
    for most in (0, per_round * N - 1, per_round * N, 5 * per_round * N + 1):
        coordinator = start(replace(RULES, seeds=seeds, replay_numbers=most))
        play(coordinator, 8)
        assert longest_catch_up(coordinator) == (most // (per_round * N), 8)


def test_catch_up_never_makes_an_order_long() -> None:
    coordinator = start(replace(RULES, kind="rademacher", k=400, replay_numbers=2**40), n=60_000)
    each = len(encode(play(coordinator).update))
    play(coordinator, 16)
    assert MAX_UPDATES_BYTES < 17 * each < coordinator.state.values.nbytes
    longest, rounds = longest_catch_up(coordinator)
    assert longest == MAX_UPDATES_BYTES // each < rounds
    coordinator.holds(0, rounds - longest)
    assert len(encode(coordinator.order(0))) < MAX_UPDATES_BYTES + 200


def test_what_a_device_says_that_it_holds_is_taken_if_it_can_be() -> None:
    coordinator = start()
    play(coordinator, 3)
    for said, taken in [(2, 2), (3, 3), (0, 0), (4, NOTHING_HELD), (2**32 - 1, NOTHING_HELD), (-1, NOTHING_HELD)]:
        coordinator.holds(5, said)
        assert coordinator.state.last_seen[5] == taken
    coordinator.holds(5, 3)
    assert coordinator.catch_up(5) == ()
    coordinator.holds(5, 1)
    assert [update.round for update in coordinator.catch_up(5)] == [2, 3]


def test_log_holds_no_more_than_could_be_sent() -> None:
    coordinator = start(optimiser=OPTIMISERS["momentum"], n=200)
    for _ in range(40):
        play(coordinator)
        assert sum(len(encode(update)) for update in coordinator.log) < 2 * 4 * 200
    assert len(coordinator.log) > 5
    assert [update.round for update in coordinator.log] == list(range(41 - len(coordinator.log), 41))


def test_device_that_did_not_answer_is_not_taken_to_hold_the_values() -> None:
    coordinator = start()
    orders = coordinator.open()
    coordinator.receive(reply_to(orders[0]))
    learn(coordinator)
    assert coordinator.state.last_seen[orders[0].device] == 0
    assert coordinator.state.last_seen[orders[1].device] == -1
    assert coordinator.catch_up(orders[0].device)
    assert not coordinator.catch_up(orders[1].device)


def test_order_says_what_the_rules_say() -> None:
    rules = replace(RULES, kind="rademacher", seeds="shared", spread=2, central=True, local_steps=3, local_lr=0.5)
    coordinator = start(rules)
    (order, *_) = coordinator.open()
    expected = OrderMessage(
        b"run-name", 1, order.device, 2**40 + 7, 4, 1e-3, True, True, 2, True, 3, 0.5, 32,
        values_hash(coordinator.state.values), (),
    )  # fmt: skip
    assert order == expected
    closed = play(coordinator)
    coordinator.open()
    coordinator.holds(0, 0)
    assert coordinator.order(0) == expected._replace(
        round=2, device=0, values_hash=values_hash(coordinator.state.values), updates=(closed.update,)
    )


@pytest.mark.parametrize("rounds", [0, 1, 23, 24, 300])
def test_size_of_an_order_is_that_of_its_encoding(rounds: int) -> None:
    coordinator = start(replace(RULES, k=1, seeds="shared"), n=20_000)
    coordinator.holds(0, 0)
    for _ in range(rounds):
        for order in coordinator.open(range(1, RULES.devices)):
            coordinator.receive(reply_to(order))
        learn(coordinator)
    coordinator.open()
    order = coordinator.order(0)
    assert len(order.updates) == rounds
    assert coordinator.order_bytes(order) == len(encode(order))

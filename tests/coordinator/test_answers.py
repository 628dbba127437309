"""Replies of a few bits: what the server takes them for, what it refuses, and that they point the right way."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.coordinator import Coordinator, Optimiser, Rules
from foreseed.coordinator.answers import differences, fault
from foreseed.engine import Directions, ForeseedError, project, quantise
from foreseed.engine.blocks import Block, spans
from foreseed.methods.ntk_baffle import learn
from foreseed.wire import OrderMessage, Reply, decode, encode

RULES = Rules(b"run-name", seed=7, devices=1, per_round=1, k=9, sigma=1e-3)


def packed(numbers: Any, bits: int, round: int = 1, device: int = 0, seed: int = 7) -> Reply:
    floats = array("f", numbers)
    if bits == 32:
        losses = (array("f", [2.3]) + floats).tobytes()
    else:
        scale, codes = quantise(floats, bits, seed, round, device)
        losses = array("f", [2.3, scale]).tobytes() + codes
    return Reply(b"run-", round, device, 10, losses)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40),
    st.sampled_from([2, 4, 8]),
)
def test_decoded_differences_are_within_a_level_of_what_was_measured(numbers: list[float], bits: int) -> None:
    rules = replace(RULES, bits=bits, k=len(numbers))
    reply = packed(numbers, bits)
    assert fault(reply, rules) is None
    assert decode(encode(reply)) == reply
    found, scale = differences(reply, rules), max(map(abs, numbers))
    assert (np.abs(found - numbers) <= 2 * scale / (2**bits - 1) * (1 + 1e-12)).all()


def test_whole_numbers_are_taken_as_they_are() -> None:
    numbers = np.random.default_rng(1).normal(size=9).astype("<f4")
    np.testing.assert_array_equal(differences(packed(numbers, 32), RULES), numbers.astype(np.float64))


def test_one_bit_is_the_sign_times_the_mean_size_times_half_of_pi() -> None:
    found = differences(packed([1, -2, 3, 0, -0.0, 6, 1, 1, -2], 1), replace(RULES, bits=1))
    size = np.pi / 2 * np.float64(np.float32(16 / 9))
    np.testing.assert_array_equal(found, size * np.array([1, -1, 1, 1, 1, 1, 1, 1, -1]))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_differences_that_are_all_zero_move_nothing(bits: int) -> None:
    rules = replace(RULES, bits=bits)
    reply = packed(np.zeros(9), bits)
    assert fault(reply, rules) is None
    np.testing.assert_array_equal(differences(reply, rules), 0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_what_is_no_answer_of_so_many_bits_is_refused_by_its_reason(bits: int) -> None:
    coordinator = Coordinator.start(replace(RULES, bits=bits), Optimiser(), np.zeros(30))
    (order,) = coordinator.open()
    assert order.bits == bits
    good = packed(np.random.default_rng(1).normal(size=9), bits)
    whole, head = good.losses, good.losses[:4]

    def number(x: float) -> bytes:
        return array("f", [x]).tobytes()

    wrong = {
        whole + b"\0": "wrong length",
        whole[:-1]: "wrong length",
        packed(np.zeros(9), 32).losses: "wrong length",
        number(np.nan) + whole[4:]: "not finite",
        head + number(np.inf) + whole[8:]: "not finite",
        head + number(-1) + whole[8:]: "negative scale",
    }
    if bits < 8:  # nine codes of 8 bits fill their bytes
        wrong[whole[:-1] + bytes([whole[-1] | 0x80])] = "unused bits set"
    for losses, reason in wrong.items():
        assert coordinator.receive(good._replace(losses=losses)) == reason
        assert coordinator.replies == ()
        coordinator.open()
    assert coordinator.receive(good) is None


BLOCKS = (Block(10, 9, 1), Block(12, 4, 2), Block(8, 3, 3))


def packed_blocks(numbers: Any, bits: int) -> Reply:
    scales, codes = [], []
    for block, span in enumerate(spans(BLOCKS)):
        scale, packed = quantise(array("f", numbers[span.first : span.first + span.k]), bits, 7, 1, 0, block)
        scales.append(scale)
        codes.append(bytes(packed))
    losses = array("f", [2.3, *scales]).tobytes() + b"".join(codes)
    return Reply(b"run-", 1, 0, 10, losses)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_every_block_has_a_scale_of_its_own(bits: int) -> None:
    rules = replace(RULES, bits=bits, k=16, blocks=BLOCKS)
    numbers = np.random.default_rng(1).normal(size=16) * np.repeat([1.0, 1e-3, 1e3], [9, 4, 3])
    reply = packed_blocks(numbers, bits)
    assert fault(reply, rules) is None
    found = differences(reply, rules)
    for span in spans(BLOCKS):
        here = slice(span.first, span.first + span.k)
        if bits == 1:
            np.testing.assert_array_equal(np.sign(found[here]), np.sign(numbers[here]))
            assert np.abs(found[here]) == pytest.approx(np.pi / 2 * np.abs(numbers[here]).mean())
        else:
            level = 2 * np.abs(numbers[here]).max() / (2**bits - 1)
            assert (np.abs(found[here] - numbers[here]) <= level * (1 + 1e-6)).all()


def test_what_is_no_answer_of_blocks_is_refused_by_its_reason() -> None:
    rules = replace(RULES, bits=1, k=16, blocks=BLOCKS)
    coordinator = Coordinator.start(rules, Optimiser(), np.zeros(30))
    (order,) = coordinator.open()
    assert (order.k, order.spread, order.blocks) == (16, 1, BLOCKS)
    good = packed_blocks(np.random.default_rng(1).normal(size=16), 1)
    whole = good.losses
    wrong = {
        whole[:-1]: "wrong length",
        packed(np.zeros(16), 1).losses: "wrong length",
        whole[:12] + array("f", [-1.0]).tobytes() + whole[16:]: "negative scale",
        whole[:17] + bytes([whole[17] | 0x80]) + whole[18:]: "unused bits set",  # of the first block, which has 9
    }
    for losses, reason in wrong.items():
        assert coordinator.receive(good._replace(losses=losses)) == reason
        coordinator.open()
    assert coordinator.receive(good) is None


def test_rules_refuse_what_cannot_be() -> None:
    with pytest.raises(ForeseedError, match="2 local steps and k 9: expected one step, and as many directions"):
        replace(RULES, blocks=(Block(10, 9, 1),), local_steps=2)
    with pytest.raises(ForeseedError, match="k 10: expected one step, and as many directions"):
        replace(RULES, blocks=(Block(10, 9, 1),), k=10)
    with pytest.raises(ForeseedError, match="bits 3 given, expected one of 1, 2, 4, 8, 32"):
        replace(RULES, bits=3)
    with pytest.raises(ForeseedError, match=r"train.bits below 32 only with train.local_steps = 1, not 2"):
        replace(RULES, bits=8, local_steps=2)


# --- on average ---

N, K, ROUNDS, SIGMA = 40, 400, 60, 1e-2
GRADIENT = np.random.default_rng(3).normal(size=N).astype(np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_the_mean_estimate_by_blocks_is_the_gradient(kind: str) -> None:
    blocks = (Block(15, 300, 1), Block(25, 500, 1))
    rules = replace(RULES, k=800, sigma=SIGMA, kind=kind, blocks=blocks)
    coordinator = Coordinator.start(rules, Optimiser(lr=1.0, momentum=0.0, lr_decay=1.0), np.zeros(N))
    estimates = []
    for _ in range(ROUNDS):
        before = coordinator.state.values.copy()
        (order,) = coordinator.open()
        slopes = [
            slope
            for span in spans(blocks)
            for slope in project(
                Directions(order.seed, order.round, order.device, span.k, span.first, kind=kind),
                GRADIENT[span.at : span.at + span.size].copy(),
            )
        ]
        losses = array("f", [2.3, *(SIGMA * slope for slope in slopes)]).tobytes()
        assert coordinator.receive(Reply(b"run-", order.round, 0, 10, losses)) is None
        learn(coordinator)
        estimates.append(before.astype(np.float64) - coordinator.state.values)
    mean, spread = np.mean(estimates, axis=0), np.std(estimates, axis=0) / np.sqrt(ROUNDS)
    assert (np.abs(mean - GRADIENT) < 5 * spread).all()
    # The error of a block follows from its own values, directions and slopes: (n + 1)/K |g|^2, or (n - 1)/K |g|^2.
    errors = np.square(estimates - GRADIENT)
    for span in spans(blocks):
        here = slice(span.at, span.at + span.size)
        law = (span.size + (1 if kind == "gaussian" else -1)) / span.k * np.square(GRADIENT[here]).sum()
        sums = errors[:, here].sum(axis=1)
        assert abs(sums.mean() - law) < 5 * sums.std() / np.sqrt(ROUNDS)


def answer_to(order: OrderMessage) -> Reply:
    """The reply of a device whose loss is linear."""
    slopes = project(Directions(order.seed, order.round, order.device, K), GRADIENT)
    return packed([SIGMA * slope for slope in slopes], order.bits, order.round, order.device, order.seed)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 32])
def test_the_mean_estimate_is_the_gradient(bits: int) -> None:
    rules = replace(RULES, k=K, sigma=SIGMA, bits=bits)
    coordinator = Coordinator.start(rules, Optimiser(lr=1.0, momentum=0.0, lr_decay=1.0), np.zeros(N))
    estimates = []
    for _ in range(ROUNDS):
        before = coordinator.state.values.copy()
        for order in coordinator.open():
            assert coordinator.receive(answer_to(order)) is None
        learn(coordinator)
        estimates.append(before.astype(np.float64) - coordinator.state.values)
    mean, spread = np.mean(estimates, axis=0), np.std(estimates, axis=0) / np.sqrt(ROUNDS)
    # 40 coordinates, 5 standard errors; one bit keeps the length too, but for a bias of order 1/K.
    assert (np.abs(mean - GRADIENT) < 5 * spread).all()
    along = mean @ GRADIENT / (GRADIENT @ GRADIENT)
    assert along == pytest.approx(1, abs=0.02)

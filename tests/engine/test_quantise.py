"""Packed loss differences: the same bits in plain Python, NumPy and C, and right on average."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreseed.engine.errors import ForeseedError, ValuesError
from foreseed.engine.types import SHARED_DEVICE, code_bytes
from tests.engine import plain
from tests.engine.conftest import Backend
from tests.engine.vectors import HUGE, TINY

few = settings(max_examples=150, deadline=None)
widths = st.sampled_from([1, 2, 4, 8])
words = st.integers(0, 2**32 - 1)
seeds = st.integers(0, 2**64 - 1)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
SEED, ROUND, DEVICE = 11, 3, 5


def codes(packed: bytes, bits: int, n: int) -> np.ndarray:
    """The codes, one number each, and nothing behind them."""
    whole = int.from_bytes(packed, "little")
    assert len(packed) == code_bytes(n, bits)
    assert whole >> n * bits == 0
    return np.array([whole >> i * bits & 2**bits - 1 for i in range(n)])


@few
@given(st.lists(floats, min_size=1, max_size=70), widths, seeds, words, words, st.integers(0, 2**16 - 1))
@example([0.0], 8, 0, 0, 0, 0)
@example([-0.0, 0.0, -0.0], 1, 0, 0, 0, 0)
@example([HUGE] * 9, 1, 1, 1, 1, 0)
@example([-HUGE, HUGE, TINY], 8, 2**64 - 1, 2**32 - 1, SHARED_DEVICE, 2**16 - 1)
@example([TINY, -TINY] * 5, 4, 1, 2, 3, 1)
def test_every_backend_gives_the_bits_of_plain_python(
    backend: Backend, differences: list[float], bits: int, seed: int, round: int, device: int, block: int
) -> None:
    given_, expected = array("f", differences), plain.quantise(differences, bits, seed, round, device, block)
    before = given_.tobytes()
    scale, packed = backend.functions.quantise(given_, bits, seed, round, device, block)
    assert (plain.to_bits(scale), bytes(packed)) == (plain.to_bits(expected[0]), expected[1])
    # In place: the codes are the first bytes, and what follows them is as it was.
    assert given_.tobytes() == expected[1] + before[len(expected[1]) :]


@few
@given(st.lists(floats, min_size=1, max_size=70), st.sampled_from([2, 4, 8]), seeds)
def test_a_code_is_a_level_next_to_its_difference(differences: list[float], bits: int, seed: int) -> None:
    scale, packed = plain.quantise(differences, bits, seed, ROUND, DEVICE)
    levels = 2**bits - 1
    values = scale * (2 * codes(packed, bits, len(differences)) / levels - 1)
    assert scale == max(map(abs, differences))
    assert (np.abs(values - differences) <= 2 * scale / levels * (1 + 1e-12)).all()
    ends = np.abs(differences) == scale
    np.testing.assert_allclose(values[ends], np.array(differences)[ends])


def test_one_bit_is_the_sign_and_zero_counts_as_positive(backend: Backend) -> None:
    differences = [1.0, -2.0, 0.0, -0.0, -TINY, TINY, 5.0, -HUGE / 2**100, 3.0]
    scale, packed = backend.functions.quantise(array("f", differences), 1, SEED, ROUND, DEVICE)
    assert codes(bytes(packed), 1, 9).tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert scale == np.float32(sum(map(abs, differences)) / 9)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_right_on_average(backend: Backend, bits: int) -> None:
    n, levels = 60_000, 2**bits - 1
    rng = np.random.default_rng(bits)
    differences = rng.uniform(-1, 1, n).astype(np.float32)
    differences[0] = 1  # the scale
    scale, packed = backend.functions.quantise(array("f", differences.tobytes()), bits, SEED, ROUND, DEVICE)
    errors = scale * (2 * codes(bytes(packed), bits, n) / levels - 1) - differences.astype(np.float64)
    # A step of 2/L is taken up with probability p: its variance is (2/L)^2 p (1 - p), on average over p a sixth of it.
    spread = 2 / levels / np.sqrt(6)
    assert abs(errors.mean()) <= 5 * spread / np.sqrt(n)
    assert errors.std() == pytest.approx(spread, rel=0.02)
    # Nor does the error lean towards the difference, as that of rounding to the nearest level would.
    assert abs((errors * differences).mean()) <= 5 * spread / np.sqrt(n)


@pytest.mark.parametrize("bits", [2, 8])
def test_devices_rounds_seeds_and_blocks_round_each_in_their_own_way(backend: Backend, bits: int) -> None:
    numbers = plain.direction(plain.Directions(1, 0, 0, 1), 0, 400)
    packed = {
        bytes(backend.functions.quantise(array("f", numbers), bits, *source)[1])
        for source in [
            (1, 2, 3),
            (2, 2, 3),
            (1, 3, 3),
            (1, 2, 4),
            (1, 2, SHARED_DEVICE),
            (1 + 2**32, 2, 3),
            (1, 2, 3, 1),
        ]
    }
    assert len(packed) == 7
    whole, first = (backend.functions.quantise(array("f", numbers), bits, 1, 2, 3, *block)[1] for block in ((), (0,)))
    assert whole == first


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_what_cannot_be_packed_is_refused_and_left_as_it_is(backend: Backend, bits: int) -> None:
    for wrong in (float("nan"), float("inf"), -float("inf")):
        numbers = array("f", [1.0, wrong, 2.0])
        before = numbers.tobytes()
        with pytest.raises(ValuesError, match="larger than float32 holds"):
            backend.functions.quantise(numbers, bits, SEED, ROUND, DEVICE)
        assert numbers.tobytes() == before
    with pytest.raises(ForeseedError, match="0 loss differences"):
        backend.functions.quantise(array("f"), bits, SEED, ROUND, DEVICE)


@pytest.mark.parametrize("block", [-1, 2**16])
def test_blocks_whose_words_might_be_a_direction_s_are_refused(backend: Backend, block: int) -> None:
    with pytest.raises(ForeseedError, match=f"of block {block}: expected"):
        backend.functions.quantise(array("f", [1.0]), 2, SEED, ROUND, DEVICE, block)


@pytest.mark.parametrize("bits", [0, 3, 16, 32])
def test_other_widths_are_refused(backend: Backend, bits: int) -> None:
    with pytest.raises(ForeseedError, match=f"in {bits} bits each: expected"):
        backend.functions.quantise(array("f", [1.0]), bits, SEED, ROUND, DEVICE)

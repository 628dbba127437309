"""Draws: the same numbers on every machine, of the distributions that they claim."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreseed.draws import Draws, _exp, _log


def test_numbers_are_the_same_on_every_machine() -> None:
    draws = Draws(2**40 + 1, "a path", 3)
    assert [f"{word:016x}" for word in draws.words(2)] == ["279c6ee4c244b743", "e246cba8a23b4674"]
    assert [x.hex() for x in draws.uniforms(2)] == ["0x1.f8419fe2e0b9cp-2", "0x1.4065f9b9b3118p-1"]
    assert [float(x).hex() for x in draws.normals(3)] == [
        "-0x1.ea63180000000p-1",
        "-0x1.62835a0000000p+0",
        "-0x1.bc024a0000000p-2",
    ]
    assert draws.permutation(8).tolist() == [3, 7, 5, 1, 0, 4, 2, 6]
    assert draws.choose([9, 4, 7, 1, 4], 2) == [1, 4]
    assert [x.hex() for x in draws.dirichlet(0.1, 3)] == [
        "0x1.ed6a79716e3afp-1",
        "0x1.1bc768c9f760ep-6",
        "0x1.36e96908413f1p-6",
    ]


def test_seeds_paths_and_calls_draw_apart() -> None:
    drawn = [Draws(0, "a"), Draws(1, "a"), Draws(0, "b"), Draws(0, "a", 0)]
    first = [tuple(draws.normals(4)) for draws in drawn]
    again = [tuple(draws.normals(4)) for draws in drawn]
    assert len({*first, *again}) == 8
    assert tuple(Draws(0, "a").normals(4)) == first[0]
    assert Draws(0, "a").normals(2, 3, 4).shape == (2, 3, 4)


def test_a_choice_is_without_replacement_sorted_and_of_the_pool_in_any_order() -> None:
    for count in range(7):
        chosen = Draws(5, count).choose([30, 10, 20, 10, 40], count)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(count, 4)
        assert chosen == Draws(5, count).choose([10, 20, 30, 40], count)


@pytest.mark.parametrize("shape", [1.0, 1.05, 3.5, 1e6])
def test_gammas_have_their_mean_and_variance(shape: float) -> None:
    n = 40_000
    drawn = Draws(1, "gamma")._gammas(shape, n)
    # Five standard errors: of a mean sqrt(a / n), of a variance at most a sqrt((2 + 6 / a) / n).
    assert drawn.mean() == pytest.approx(shape, abs=5 * math.sqrt(shape / n))
    assert drawn.var() == pytest.approx(shape, abs=5 * shape * math.sqrt((2 + 6 / shape) / n))


@pytest.mark.parametrize("beta", [1e-12, 0.01, 0.1, 1.0, 100.0])
def test_dirichlet_shares_add_up_and_spread_as_they_should(beta: float) -> None:
    shares = np.stack([Draws(seed, "dirichlet").dirichlet(beta, 5) for seed in range(600)])
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-14)
    squares = (shares**2).sum(axis=1)
    error = squares.std(ddof=1) / math.sqrt(len(squares))
    assert squares.mean() == pytest.approx((beta + 1) / (5 * beta + 1), abs=4 * error + 1e-11)


def test_logarithms_and_exponentials_are_good_to_the_last_bits() -> None:
    x = np.exp(np.linspace(-300, 300, 20_001))
    assert np.abs(_log(x) - np.log(x)).max() < 1e-13
    y = np.linspace(-699, 0, 20_001)
    assert np.abs(_exp(y) / np.exp(y) - 1).max() < 2e-13
    assert _exp(np.array([-701.0, -1e308])).tolist() == [0.0, 0.0]

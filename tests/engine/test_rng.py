"""Random directions and updates: the published generator, good normals, and the same bits everywhere."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erfinv, ndtri
from scipy.stats import kstest, norm

from foreseed.engine import reference_rng as reference
from foreseed.engine.errors import ValuesError
from foreseed.engine.types import Buffer, DirectionKind, Directions
from tests.engine import plain
from tests.engine.conftest import Backend
from tests.engine.programs import directions

N, FEWER = 2**22, 2**20
SIGMAS = 5.0
BASE = Directions(seed=20_240_229, round=3, device=5, count=1)
SIGNS = Directions(seed=20_240_229, round=3, device=5, count=1, kind="rademacher")
OTHERS = {
    "k": (BASE, 1),
    "device": (Directions(BASE.seed, BASE.round, BASE.device + 1, 1), 0),
    "round": (Directions(BASE.seed, BASE.round + 1, BASE.device, 1), 0),
    "swapped round and device": (Directions(BASE.seed, BASE.device, BASE.round, 1), 0),
    "low seed": (Directions(BASE.seed + 1, BASE.round, BASE.device, 1), 0),
    "high seed": (Directions(BASE.seed + 2**32, BASE.round, BASE.device, 1), 0),
}

few = settings(max_examples=60, deadline=None)
numbers = st.floats(-1e3, 1e3, width=32)
rates = st.floats(0, 1, width=32)


def bits(numbers: Buffer) -> list[int]:
    return np.frombuffer(numbers, np.uint32).tolist()


def direction(backend: Backend, d: Directions, k: int, n: int = N) -> np.ndarray:
    return np.frombuffer(backend.functions.direction(d, k, n), np.float32)


@pytest.fixture(scope="module")
def normals(backend: Backend) -> np.ndarray:
    return direction(backend, BASE, 0).astype(np.float64)


@pytest.fixture(scope="module")
def signs(backend: Backend) -> np.ndarray:
    return direction(backend, SIGNS, 0).astype(np.float64)


def is_noise(mean: float, deviation: float, n: int) -> bool:
    """The mean of n numbers of expectation 0 and this standard deviation is as close to 0 as chance allows."""
    return abs(mean) <= SIGMAS * deviation / np.sqrt(n)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_known_answers(backend: Backend, counter: str, key: str, words: str) -> None:
    k0, k1 = (int(word, 16) for word in key.split())
    given = backend.functions.philox([int(word, 16) for word in counter.split()], k0 | k1 << 32)
    assert [f"{int(word):08x}" for word in given] == words.split()


@pytest.mark.parametrize(("power", "expected", "variance"), [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)])
def test_normals_have_the_moments_of_a_normal(
    normals: np.ndarray, power: int, expected: float, variance: float
) -> None:
    # Var[z^p] = E[z^2p] - E[z^p]^2: 1, 3 - 1, 15, 105 - 9.
    assert is_noise(np.mean(normals**power) - expected, np.sqrt(variance), N)


@pytest.mark.parametrize("bound", [1, 2, 3, 4])
def test_normals_have_the_tails_of_a_normal(normals: np.ndarray, bound: float) -> None:
    p = 2 * norm.sf(bound)
    assert is_noise(np.mean(np.abs(normals) > bound) - p, np.sqrt(p * (1 - p)), N)
    assert is_noise(np.mean(normals > bound) - p / 2, np.sqrt(p / 2), N)


def test_normals_pass_kolmogorov_and_smirnov(normals: np.ndarray) -> None:
    assert kstest(normals, norm.cdf).pvalue > 2 * norm.sf(SIGMAS)


@pytest.mark.parametrize("what", OTHERS)
def test_directions_of_other_k_devices_rounds_and_seeds_are_uncorrelated(
    backend: Backend, normals: np.ndarray, what: str
) -> None:
    d, k = OTHERS[what]
    mine, other = normals[:FEWER], direction(backend, d, k, FEWER).astype(np.float64)
    assert is_noise(np.mean(mine * other), 1, FEWER)
    assert is_noise(np.mean((mine**2 - 1) * (other**2 - 1)), 2, FEWER)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 128])
def test_coordinates_of_a_direction_are_uncorrelated(normals: np.ndarray, signs: np.ndarray, lag: int) -> None:
    assert is_noise(np.mean(normals[lag:] * normals[:-lag]), 1, N - lag)
    assert is_noise(np.mean(signs[lag:] * signs[:-lag]), 1, N - lag)


def test_signs_are_fair_at_every_place_of_a_block(signs: np.ndarray) -> None:
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert is_noise(signs.mean(), 1, N)
    assert all(is_noise(place, 1, N // 128) for place in signs.reshape(-1, 128).mean(axis=0))


@pytest.mark.parametrize("what", OTHERS)
def test_signs_of_other_k_devices_rounds_and_seeds_are_uncorrelated(
    backend: Backend, signs: np.ndarray, what: str
) -> None:
    d, k = OTHERS[what]
    other = direction(backend, Directions(d.seed, d.round, d.device, 1, kind="rademacher"), k, FEWER)
    assert is_noise(np.mean(signs[:FEWER] * other), 1, FEWER)


def quantiles(words: np.ndarray) -> np.ndarray:
    """The exact normal number of each word: the quantile at its place among all 2^32 words."""
    s = words.astype(np.uint32).view(np.int32).astype(np.float64)
    nearer_end = (np.where(s >= 0, 2**31 - 1 - s, 2**31 + s) + 0.5) / 2**32
    middle = np.sqrt(2) * erfinv(2 * (s + 0.5) / 2**32)
    return np.where(nearer_end < 0.1, np.copysign(ndtri(nearer_end), s), middle)


# The quotient of the two polynomials takes 14 roundings, all of positive terms, and q and r bring in less than four
# more; the formula itself is exact to 1e-7, less than two.
ACCURACY = 20 * 2.0**-24


def test_normals_are_the_quantiles_of_their_words(normals: np.ndarray) -> None:
    blocks = np.arange(N // 4)
    words = np.stack(reference.philox((blocks, 0, BASE.device, BASE.round), BASE.seed), axis=-1).ravel()
    np.testing.assert_allclose(normals, quantiles(words), rtol=ACCURACY, atol=0)


def test_normals_are_accurate_at_every_edge_of_the_range_of_words(backend: Backend) -> None:
    ends = [0, 2**31, 2**32, round(0.425 * 2**32), round(0.575 * 2**32)]
    octaves = [round(2.0 ** (bit / 2)) for bit in range(62)]
    near = [centre + step for centre in (*ends, *octaves, *(2**31 - x for x in octaves)) for step in range(-2, 3)]
    words = sorted({word % 2**32 for word in (*near, *range(0, 2**32, 2**32 // 500))})
    z = []
    for word in words:
        d, k, start = plain.where(word)
        z.append(backend.functions.direction(d, k, 1, start)[0])
    assert min(z) == -max(z) == pytest.approx(-6.338, abs=1e-3)
    np.testing.assert_allclose(z, quantiles(np.array(words)), rtol=ACCURACY, atol=0)


@few
@given(d=directions(), n=st.integers(0, 150), start=st.integers(0, 2**32 - 200))
def test_directions_are_those_of_the_protocol_to_the_bit(backend: Backend, d: Directions, n: int, start: int) -> None:
    z = backend.functions.direction(d, d.first, n, start)
    assert bits(z) == bits(array("f", plain.direction(d, d.first, n, start)))


@few
@given(d=directions(), n=st.integers(0, 3000), start=st.integers(0, 3000))
def test_any_range_of_a_direction_has_the_bits_of_the_whole(
    backend: Backend, d: Directions, n: int, start: int
) -> None:
    whole = reference.direction(d, d.first, start + n)
    assert bits(backend.functions.direction(d, d.first, n, start)) == bits(whole[start:])


@few
@given(d=directions(), values=st.lists(numbers, max_size=150))
def test_perturbing_is_that_of_the_protocol_to_the_bit(backend: Backend, d: Directions, values: list[float]) -> None:
    given = array("f", values)
    perturbed = backend.functions.perturb(given, d, d.first)
    assert bits(perturbed) == bits(array("f", plain.perturb(values, d, d.first)))
    assert given == array("f", values)


@few
@given(d=directions(), gradient=st.lists(numbers, max_size=60), start=st.integers(0, 2**32 - 200), data=st.data())
def test_accumulating_is_that_of_the_protocol_to_the_bit(
    backend: Backend, d: Directions, gradient: list[float], start: int, data: st.DataObject
) -> None:
    coefficients = data.draw(st.lists(numbers, min_size=d.count, max_size=d.count))
    given = array("f", gradient)
    backend.functions.accumulate(given, d, array("f", coefficients), start)
    assert bits(given) == bits(array("f", plain.accumulate(gradient, d, coefficients, start)))


@few
@given(d=directions(), n=st.integers(0, 3000), start=st.integers(0, 3000))
def test_long_vectors_have_the_bits_of_the_reference(backend: Backend, d: Directions, n: int, start: int) -> None:
    values = reference.direction(BASE, 1, n)
    coefficients = reference.direction(BASE, 2, d.count)
    assert bits(backend.functions.perturb(values, d, d.first)) == bits(reference.perturb(values, d, d.first))
    whole = np.zeros(start + n, np.float32)
    whole[start:] = values
    reference.accumulate(whole, d, coefficients)
    backend.functions.accumulate(values, d, coefficients, start)
    assert bits(values) == bits(whole[start:])


@few
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    kind=st.sampled_from(["gaussian", "rademacher"]),
    n=st.integers(1, 1500),
    data=st.data(),
)
def test_rebuilding_is_accumulating_half_by_half(
    backend: Backend, counts: list[int], kind: DirectionKind, n: int, data: st.DataObject
) -> None:
    parts = [Directions(7, 3, device, count, kind=kind) for device, count in enumerate(counts)]
    factors, at = reference.direction(BASE, 2, sum(counts)), data.draw(st.integers(0, n - 1)) // 128 * 128
    gradient, halves = np.zeros(n, np.float32), np.full((len(parts), 2, n), np.nan, np.float32)
    for first, end in ((0, at), (at, n)):
        backend.functions.rebuild(gradient, halves, parts, factors.tobytes(), first, end - first)
    expected = np.zeros(n, np.float32)
    for part, d in enumerate(parts):
        for half, some in enumerate(np.split(np.arange(d.count), [d.count // 2])):
            before = expected.copy()
            for k in some:
                one = Directions(7, 3, d.device, 1, int(k), kind=kind)
                reference.accumulate(expected, one, factors[sum(counts[:part]) + k :][:1].copy())
            assert bits(halves[part, half].copy()) == bits(expected - before)
    assert bits(gradient) == bits(expected)


def test_rebuilding_refuses_what_does_not_fit(backend: Backend) -> None:
    gradient, halves, one = np.zeros(4, np.float32), np.zeros((1, 2, 4), np.float32), np.ones(1, np.float32)
    with pytest.raises(ValuesError, match="2 coefficients for 1 directions"):
        backend.functions.rebuild(gradient, halves, [BASE], np.ones(2, np.float32), 0, 4)
    with pytest.raises(ValuesError, match="coordinates 1 to 5 of 4"):
        backend.functions.rebuild(gradient, halves, [BASE], one, 1, 4)
    with pytest.raises(ValuesError, match="of 4, 1 parts"):
        backend.functions.rebuild(gradient, halves[:, :1].copy(), [BASE], one, 0, 4)
    assert not gradient.any()


@few
@given(count=st.integers(1, 4), n=st.integers(1, 300))
def test_parts_are_compared_in_one_order(backend: Backend, count: int, n: int) -> None:
    halves = reference.direction(BASE, 3, 2 * count * n).reshape(count, 2, n)
    sums, products = np.empty((2, n)), np.empty((count, 2))
    backend.functions.compare(halves, n, sums, products)
    expected = halves[0].astype(np.float64)
    for part in halves[1:]:
        expected = expected + part
    assert sums.tolist() == expected.tolist()
    parts, whole = halves[:, 0].astype(np.float64) + halves[:, 1], expected[0] + expected[1]
    for (own, common), part in zip(products, parts, strict=True):
        for found, other in ((own, part), (common, whole)):
            chains = [0.0] * 8
            for j, product in enumerate((part * other).tolist()):
                chains[j % 8] += product
            total = 0.0
            for chain in chains:
                total += chain
            assert found == total


def test_comparing_refuses_what_does_not_fit(backend: Backend) -> None:
    halves, sums, products = np.zeros((2, 2, 3), np.float32), np.zeros((2, 3)), np.zeros((2, 2))
    for wrong in ((halves, 4, sums, products), (halves, 3, sums[0], products), (halves, 3, sums, products[0])):
        with pytest.raises(ValuesError, match="room for"):
            backend.functions.compare(*wrong)


vectors = st.integers(0, 100).flatmap(lambda n: st.tuples(*[st.lists(numbers, min_size=n, max_size=n)] * 4))


@few
@given(given=vectors, lr=rates, mu=rates, decay=rates)
def test_sgd_is_that_of_the_protocol_to_the_bit(
    backend: Backend, given: tuple[list[float], ...], lr: float, mu: float, decay: float
) -> None:
    start, gradient, velocity, _ = given
    for momentum, m in ((velocity, mu), (None, 0.0)):
        values, kept = array("f", start), array("f", momentum or [])
        backend.functions.sgd(values, None if momentum is None else kept, array("f", gradient), lr, m, decay)
        moved, expected = plain.sgd(start, momentum, gradient, lr, m, decay)
        assert bits(values) == bits(array("f", moved))
        assert bits(kept) == bits(array("f", expected or []))


@few
@given(given=vectors, lr=rates, beta1=rates, beta2=rates, decay=rates, k=st.floats(1, 1000, width=32))
def test_adam_is_that_of_the_protocol_to_the_bit(
    backend: Backend, given: tuple[list[float], ...], lr: float, beta1: float, beta2: float, decay: float, k: float
) -> None:
    start, gradient, first, second = given
    second = [abs(x) for x in second]
    constants = (lr, beta1, beta2, 2.0**-20, decay, k, k / 2)
    values, m, v = array("f", start), array("f", first), array("f", second)
    backend.functions.adam(values, m, v, array("f", gradient), *constants)
    expected = plain.adam(start, first, second, gradient, *constants)
    assert [bits(values), bits(m), bits(v)] == [bits(array("f", numbers)) for numbers in expected]


def test_vectors_of_different_lengths_are_refused_and_left_alone(backend: Backend) -> None:
    short, long = array("f", [1]), array("f", [1, 2])
    with pytest.raises(ValuesError, match="2 coefficients for 1 directions"):
        backend.functions.accumulate(short, BASE, long)
    with pytest.raises(ValuesError, match="expected the same length"):
        backend.functions.sgd(long, None, short, 0.1, 0.0, 0.0)
    with pytest.raises(ValuesError, match="expected the same length"):
        backend.functions.adam(long, long, short, long, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 1.0)
    assert (short.tolist(), long.tolist()) == ([1], [1, 2])

"""What every engine promises besides its numbers: clear refusals, and memory that is known beforehand."""

from __future__ import annotations

import tracemalloc
from array import array
from math import inf, log, nan
from typing import Any

import numpy as np
import pytest

from foreseed.engine.errors import BudgetError, ForeseedError, SamplesError, ValuesError
from foreseed.engine.program import Act, Kind, Op, Pool, Program, assemble
from foreseed.engine.reference import ReferenceEngine
from foreseed.engine.reference_rng import sgd
from foreseed.engine.types import Directions, Samples
from tests.engine.conftest import Backend
from tests.engine.programs import lenet5, random_values, records

DIRECTIONS = Directions(seed=1, round=2, device=3, count=2)


def changed(samples: Samples, **fields: Any) -> Samples:
    """The samples with some fields other than they are."""
    return Samples(**{name: getattr(samples, name) for name in Samples.__slots__} | fields)


def small() -> Program:
    """A net of 29 values with a batch norm, for two-channel images of 4x4 and three classes."""
    ops = [
        Op(Kind.CONV, 0, channels=2, groups=2, window=(2, 2, 2, 2, 0, 0), flags=1),
        Op(Kind.NORM, 1, eps=0.5, act=Act.RELU),
        Op(Kind.CONV, 2, channels=3, groups=1, window=(2, 2, 1, 1, 0, 0), flags=1),
    ]
    live = [i for i in range(24) if i % 3]
    return assemble((2, 4, 4), 3, [1 / 128] * 2, [-1.0] * 2, ops, [None, None, live])


@pytest.fixture
def samples() -> Samples:
    rng = np.random.default_rng(3)
    return records(rng.integers(0, 256, (5, 2, 4, 4), np.uint8), np.array([0, 1, 2, 0, 1], np.uint8))


@pytest.fixture
def values() -> array:
    return array("f", random_values(small(), np.random.default_rng(4)).tobytes())


def test_equal_logits_mean_class_zero_and_the_loss_of_a_guess(backend: Backend, samples: Samples) -> None:
    loss, correct = backend.engine(small(), batch=2).loss(array("f", [0] * 29), samples)
    assert loss == pytest.approx(5 * log(3), rel=1e-14)
    assert correct == 2


def test_any_buffer_of_float32_will_do(backend: Backend, samples: Samples, values: array) -> None:
    engine = backend.engine(small())
    expected = engine.loss(values, samples)
    for same in (values.tobytes(), bytearray(values), memoryview(values), np.array(values, np.float32)):
        assert engine.loss(same, samples) == expected
    stats = engine.batch_stats(values, samples)
    assert engine.logits(values, samples, stats.tobytes()) == engine.logits(values, samples, np.array(stats))


def test_results_have_the_promised_types_and_sizes(backend: Backend, samples: Samples, values: array) -> None:
    engine = backend.engine(small(), batch=2, directions=2)
    loss, correct = engine.loss(values, samples)
    assert (type(loss), type(correct)) == (float, int)
    logits, losses, stats = (
        engine.logits(values, samples),
        engine.probe(values, samples, DIRECTIONS),
        engine.batch_stats(values, samples),
    )
    assert [(x.typecode, len(x)) for x in (logits, losses, stats)] == [("f", 15), ("d", 2), ("f", 4)]
    assert (engine.program.n_live, engine.batch, engine.directions) == (29, 2, 2)


def test_parts_of_the_samples_are_read_where_they_lie(backend: Backend, samples: Samples, values: array) -> None:
    engine = backend.engine(small(), batch=1)
    parts = [engine.logits(values, samples.part(i, 1)) for i in range(5)]
    assert engine.logits(values, samples) == sum(parts, array("f"))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (array("f", [0] * 28), "112 bytes given, expected 116"),
        (array("f", [0] * 30), "120 bytes given, expected 116"),
        (array("d", [0] * 29), "232 bytes given, expected 116"),
        (bytes(115), "115 bytes given, expected 116"),
        (array("f", [0] * 28 + [nan]), "number 28 is nan"),
        (array("f", [inf] + [0] * 28), "number 0 is inf"),
    ],
)
def test_values_that_do_not_fit_are_refused(backend: Backend, samples: Samples, bad, said: str) -> None:
    engine = backend.engine(small())
    calls = (
        lambda: engine.loss(bad, samples),
        lambda: engine.logits(bad, samples),
        lambda: engine.batch_stats(bad, samples),
        lambda: engine.probe(bad, samples, DIRECTIONS),
    )
    for call in calls:
        with pytest.raises(ValuesError, match=f"values: {said}"):
            call()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"", "0 bytes given, expected 16"),
        (array("f", [0] * 5), "20 bytes given, expected 16"),
        (array("f", [0, 0, nan, 1]), "number 2 is nan"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    backend: Backend, samples: Samples, values: array, bad, said: str
) -> None:
    engine = backend.engine(small())
    calls = (
        lambda: engine.loss(values, samples, bad),
        lambda: engine.logits(values, samples, bad),
        lambda: engine.probe(values, samples, DIRECTIONS, bad),
    )
    for call in calls:
        with pytest.raises(ValuesError, match=f"statistics: {said}"):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"count": 0},
        {"count": -1},
        {"count": 6},
        {"stride": 34},
        {"stride": -33},
        {"image_offset": 2},
        {"image_offset": -1},
        {"label_offset": -1},
        {"label_offset": 33},
        {"data": b""},
    ],
)
def test_samples_that_are_not_there_are_refused(
    backend: Backend, samples: Samples, values: array, change: dict
) -> None:
    with pytest.raises(SamplesError):
        backend.engine(small()).loss(values, changed(samples, **change))


def test_a_label_beyond_the_classes_is_refused_before_anything_is_computed(backend: Backend, values: array) -> None:
    engine = backend.engine(small(), batch=1)
    before = engine.observed_bytes
    shard = records(np.zeros((4, 2, 4, 4), np.uint8), np.array([0, 2, 3, 4], np.uint8))
    for call in (engine.loss, lambda v, s: engine.probe(v, s, DIRECTIONS)):
        with pytest.raises(SamplesError, match="sample 2 has label 3"):
            call(values, shard)
    assert engine.observed_bytes == before


def test_logits_and_statistics_need_no_labels(backend: Backend, samples: Samples, values: array) -> None:
    engine, unlabelled = backend.engine(small()), bytearray(samples.data)
    unlabelled[:: samples.stride] = bytes([255] * samples.count)
    for call in (engine.logits, engine.batch_stats):
        assert call(values, changed(samples, data=unlabelled)) == call(values, samples)


def test_a_loss_that_is_not_finite_is_an_error(backend: Backend, samples: Samples) -> None:
    huge = array("f", [3e38] * 29)
    engine = backend.engine(small())
    for call in (engine.loss, lambda v, s: engine.probe(v, s, DIRECTIONS)):
        with pytest.raises(ValuesError, match="the loss is not finite"):
            call(huge, samples)


@pytest.mark.parametrize(("batch", "directions"), [(0, 1), (-1, 1), (1, 0)])
def test_a_batch_of_nothing_is_refused(backend: Backend, batch: int, directions: int) -> None:
    with pytest.raises(ForeseedError, match="at least 1"):
        backend.engine(small(), batch=batch, directions=directions)


def test_a_budget_too_small_is_refused_with_the_bytes_it_takes(
    backend: Backend, samples: Samples, values: array
) -> None:
    with pytest.raises(BudgetError) as refused:
        backend.engine(small(), memory_budget=100)
    needed = refused.value.needed
    assert str(needed) in str(refused.value)
    with pytest.raises(BudgetError):
        backend.engine(small(), memory_budget=needed - 1)
    engine = backend.engine(small(), memory_budget=needed)
    assert (engine.batch, engine.planned_bytes) == (1, needed)
    assert engine.loss(values, samples) == backend.engine(small(), batch=1).loss(values, samples)


def test_the_largest_batch_within_the_budget_is_taken(backend: Backend) -> None:
    program = lenet5()
    budget = backend.engine(program, batch=7).planned_bytes
    engine = backend.engine(program, batch=64, memory_budget=budget)
    assert engine.batch >= 7
    assert engine.planned_bytes <= budget < backend.engine(program, batch=engine.batch + 1).planned_bytes
    assert backend.engine(program, batch=3, memory_budget=budget).batch == 3


def test_memory_stays_within_the_plan(backend: Backend, samples: Samples, values: array) -> None:
    engine = backend.engine(small(), batch=4, directions=2)
    engine.loss(values, samples)
    engine.probe(values, samples, DIRECTIONS)
    assert 0 < engine.observed_bytes <= engine.planned_bytes


@pytest.mark.parametrize("batch", [1, 8])
def test_the_plan_of_the_reference_covers_what_numpy_allocates(batch: int) -> None:
    wide = {"channels": 16, "window": (3, 3, 1, 1, 1, 1), "flags": 1, "act": Act.HARDSWISH}
    ops = [
        Op(Kind.CONV, 0, groups=1, **wide),
        Op(Kind.NORM, 1, eps=0.1, act=Act.HARDSWISH),
        Op(Kind.CONV, 2, groups=16, pool=Pool.AVERAGE_INSIDE, pool_window=(3, 3, 1, 1, 1, 1), **wide),
        Op(Kind.ADD, 3, b=2),
        Op(Kind.NORM, 4, groups=4, eps=0.1),
        Op(Kind.CONV, 5, channels=10, groups=1, window=(1, 1, 1, 1, 0, 0), pool=Pool.AVERAGE,
           pool_window=(32, 32, 1, 1, 0, 0)),
    ]  # fmt: skip
    rng = np.random.default_rng(1)
    shard = records(rng.integers(0, 256, (8, 3, 32, 32), np.uint8), np.zeros(8, np.uint8))
    for program in (assemble((3, 32, 32), 10, [0.01] * 3, [0.0] * 3, ops, [None] * 6), lenet5()):
        numbers = random_values(program, rng)
        engine = ReferenceEngine(program, batch)
        engine.probe(numbers, shard, DIRECTIONS)
        tracemalloc.start()
        engine.probe(numbers, shard, DIRECTIONS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= engine.planned_bytes == engine.observed_bytes < 3 * peak


def test_a_negative_variance_is_refused_by_the_reference(samples: Samples, values: array) -> None:
    with pytest.raises(ValuesError, match="variance is negative"):
        ReferenceEngine(small()).loss(values, samples, array("f", [0, 0, 1, -1]))


def test_momentum_without_a_vector_for_it_is_refused_by_the_reference() -> None:
    with pytest.raises(ValuesError, match="there is no momentum"):
        sgd(array("f", [1]), None, array("f", [1]), 0.1, 0.9, 0.0)

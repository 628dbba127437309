"""Directions of a range of the values: the others stay as they are, and what comes before them is computed once."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.engine import in_parts, native, reference_rng
from foreseed.engine.errors import ForeseedError, ValuesError
from foreseed.engine.native import NativeEngine, isas
from foreseed.engine.program import Act, Kind, Op, Pool, Program, assemble
from foreseed.engine.reference import ReferenceEngine
from foreseed.engine.types import DirectionKind, Directions
from tests.engine.conftest import Backend
from tests.engine.programs import Case, directions, lenet5, programs, random_values, records

many = settings(max_examples=200, deadline=None)
some = settings(max_examples=60, deadline=None)
batches = st.integers(1, 8)


def of_range(d: Directions, at: int, size: int) -> Directions:
    """The same directions, of these values."""
    return Directions(d.seed, d.round, d.device, d.count, d.first, d.step, d.kind, d.sigma, at, size)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, Directions, list[int]]:
    """A program with values, directions of some of them, and values to keep what comes before: theirs, any or none."""
    case = draw(programs().filter(lambda case: case.program.n_live > 0))
    n = case.program.n_live
    # As often from the end: that is where there is most to be computed once.
    at = draw(st.one_of(st.integers(0, n - 1), st.integers(1, min(n, 12)).map(lambda left: n - left)))
    keep = draw(st.one_of(st.just([at]), st.lists(st.integers(0, n - 1), max_size=3)))
    return case, of_range(draw(directions()), at, draw(st.integers(1, n - at))), keep


Drawn = tuple[Case, Directions, list[int]]


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """A way to run an engine."""
    by_row = draw(st.booleans())
    return {
        "batch": draw(batches),
        "lanes": draw(st.sampled_from([0, 1, 2, 4, 8, 16])),
        "directions": 1 if by_row else draw(st.integers(1, 5)),
        "by_row": by_row,
        "isa": draw(st.sampled_from(isas())),
    }


@pytest.fixture(scope="module")
def lenet() -> Case:
    """A LeNet-5 of which a tenth is left."""
    rng = np.random.default_rng(6)
    live = [np.flatnonzero(rng.random(layer.n_dense) < 0.1).tolist() for layer in lenet5().layers()]
    program = lenet5(live)
    images, labels = rng.integers(0, 256, (20, 3, 32, 32), np.uint8), rng.integers(0, 10, 20, np.uint8)
    return Case(program, random_values(program, rng), np.empty(0, np.float32), records(images, labels), images, labels)


def linear_layers(case: Case) -> tuple[int, int]:
    """Where the values of a LeNet-5's last three layers begin, and how many there are."""
    at = sum(layer.n_values for layer in case.program.layers()[:2])
    return at, case.program.n_live - at


@many
@given(drawn=cases(), how=layouts(), freeze=st.booleans())
def test_what_is_kept_changes_no_bit(drawn: Drawn, how: dict[str, Any], freeze: bool) -> None:
    case, d, keep = drawn
    asked = case.values, case.samples, d, case.stats if freeze else None
    plain, kept = NativeEngine(case.program, **how), NativeEngine(case.program, **how, keep=keep)
    assert kept.probe(*asked).tobytes() == plain.probe(*asked).tobytes()
    assert kept.observed_bytes <= kept.planned_bytes
    # Nor does what a probe leaves behind change the next call's.
    whole = of_range(d, 0, 0)
    assert kept.probe(case.values, case.samples, whole) == plain.probe(case.values, case.samples, whole)
    assert kept.probe(*asked) == plain.probe(*asked)
    assert kept.logits(case.values, case.samples) == plain.logits(case.values, case.samples)
    assert kept.batch_stats(case.values, case.samples) == plain.batch_stats(case.values, case.samples)
    assert kept.observed_bytes <= kept.planned_bytes


@some
@given(drawn=cases(), batch=batches, at_once=st.integers(1, 3), freeze=st.booleans())
def test_probe_is_the_loss_where_only_the_range_is_perturbed(
    backend: Backend, drawn: Drawn, batch: int, at_once: int, freeze: bool
) -> None:
    case, d, keep = drawn
    stats, here = case.stats if freeze else None, slice(d.at, d.at + d.size)
    engine = backend.engine(case.program, batch=batch, directions=at_once, keep=keep)
    losses = engine.probe(case.values, case.samples, d, stats)
    for k, loss in zip(d.numbers(), losses, strict=True):
        moved = case.values.copy()
        moved[here] = backend.functions.perturb(case.values[here].copy(), d, k)
        assert engine.loss(moved, case.samples, stats)[0] == loss


@some
@given(
    drawn=cases(), how=layouts(), freeze=st.booleans(), k=st.integers(1, 7), spread=st.integers(1, 7),
    central=st.booleans(), block=st.integers(1, 8),
)  # fmt: skip
def test_an_answer_about_a_range_is_that_of_single_probes(
    drawn: Drawn, how: dict[str, Any], freeze: bool, k: int, spread: int, central: bool, block: int
) -> None:
    case, d, keep = drawn
    asked = Directions(d.seed, d.round, d.device, k, d.first, kind=d.kind, sigma=d.sigma, at=d.at, size=d.size)
    order = case.values, case.samples, asked, min(spread, k), central, case.stats if freeze else None
    engine = NativeEngine(case.program, **how, keep=keep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "BLOCK", block)
        patch.setattr(in_parts, "BLOCK", block)
        found, single = engine.differences(*order), in_parts.differences(engine, *order)
    assert (found[0].tobytes(), found[1]) == (single[0].tobytes(), single[1])


@some
@given(drawn=cases(), how=layouts(), freeze=st.booleans())
def test_the_base_of_a_probe_is_the_loss_to_the_bit(drawn: Drawn, how: dict[str, Any], freeze: bool) -> None:
    case, d, keep = drawn
    stats, engine = case.stats if freeze else None, NativeEngine(case.program, **how, keep=keep)
    base = engine.differences(case.values, case.samples, d, stats=stats)[1]
    assert base == engine.loss(case.values, case.samples, stats)[0] / case.samples.count


@some
@given(drawn=cases(), batch=batches)
def test_a_range_of_all_values_is_no_range(backend: Backend, drawn: Drawn, batch: int) -> None:
    case, d, keep = drawn
    engine = backend.engine(case.program, batch=batch, keep=keep)
    everything, unsaid = of_range(d, 0, case.program.n_live), of_range(d, 0, 0)
    assert engine.probe(case.values, case.samples, everything) == engine.probe(case.values, case.samples, unsaid)


def test_a_program_without_values_is_probed_all_the_same(backend: Backend) -> None:
    ops = [
        Op(Kind.ACT, 0, act=Act.RELU),
        Op(Kind.CONV, 1, channels=2, groups=1, window=(2, 2, 1, 1, 0, 0)),
    ]
    program = assemble((1, 2, 2), 2, [1.0], [0.0], ops, [None, []])
    shard = records(np.ones((3, 1, 2, 2), np.uint8), np.zeros(3, np.uint8))
    losses = backend.engine(program).probe(b"", shard, Directions(1, 2, 3, 2))
    assert losses.tolist() == pytest.approx([3 * np.log(2)] * 2)


def test_engines_agree_on_a_range_within_rounding(lenet: Case) -> None:
    at, size = linear_layers(lenet)
    for d in (Directions(1, 2, 3, 4, sigma=0.01, at=at, size=size), Directions(1, 2, 3, 4, sigma=0.01, at=7, size=999)):
        expected = ReferenceEngine(lenet.program).probe(lenet.values, lenet.samples, d)
        found = NativeEngine(lenet.program, directions=4, keep=[at]).probe(lenet.values, lenet.samples, d)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("at", "size"), [(5, 0), (0, -1), (-1, 1), (1 << 32, 1), (0, 1 << 32)])
def test_nonsense_ranges_are_refused(at: int, size: int) -> None:
    with pytest.raises(ForeseedError, match=f"directions of {size} values from {at} on"):
        Directions(1, 2, 3, 4, at=at, size=size)


@pytest.mark.parametrize("keep", [(), (7,)])
def test_a_range_that_the_program_has_not_is_refused(backend: Backend, lenet: Case, keep: tuple[int, ...]) -> None:
    n, engine = lenet.program.n_live, backend.engine(lenet.program, keep=keep)
    for at, size in ((0, n + 1), (n, 1), (n - 1, 2), ((1 << 32) - 1, (1 << 32) - 1)):
        d = Directions(1, 2, 3, 4, at=at, size=size)
        for call in (engine.probe, engine.differences):
            with pytest.raises(ForeseedError, match=f"values {at} to {at + size}: the program has {n}"):
                call(lenet.values, lenet.samples, d)


@pytest.mark.parametrize("at", [-1, 1 << 32])
def test_what_comes_before_values_that_the_program_has_not_cannot_be_kept(
    backend: Backend, lenet: Case, at: int
) -> None:
    n = lenet.program.n_live
    for wrong in (at, n):
        with pytest.raises(ForeseedError, match=f"value {wrong}: the program has {n}"):
            backend.engine(lenet.program, keep=[7, wrong])


def test_ranges_that_begin_elsewhere_than_what_is_kept_give_the_same_bits(lenet: Case) -> None:
    at, size = linear_layers(lenet)
    plain, kept = NativeEngine(lenet.program, directions=4), NativeEngine(lenet.program, directions=4, keep=[at])
    for first, count in ((0, at), (at - 1, 2), (at // 2, at // 4), (at, 1), (at + 1, size - 1), (at + size - 1, 1)):
        d = Directions(1, 2, 3, 6, sigma=0.01, at=first, size=count)
        assert kept.probe(lenet.values, lenet.samples, d) == plain.probe(lenet.values, lenet.samples, d)


@pytest.mark.parametrize("at", [4, 9])
def test_what_comes_before_a_range_is_computed_for_one_direction_only(at: int) -> None:
    same, means = (1, 1, 1, 1, 0, 0), (1, 1, 0, 0, 0, 0)
    ops = [
        Op(Kind.CONV, 0, channels=4, groups=1, window=same),
        Op(Kind.POOL, 1, pool=Pool.MAX, pool_window=same),
        Op(Kind.POOL, 2, pool=Pool.ADAPTIVE, pool_window=means),
        Op(Kind.CONV, 3, channels=3, groups=1, window=same),
    ]
    program, rng = assemble((1, 8, 8), 3, [0.01], [0.0], ops, [None] * 4), np.random.default_rng(8)
    shard = records(rng.integers(0, 256, (9, 1, 8, 8), np.uint8), np.zeros(9, np.uint8))
    values = random_values(program, rng)
    engine, untouched = NativeEngine(program, batch=1, directions=4, keep=[4]), []
    for span in ({"at": at, "size": 16 - at}, {}):
        engine.probe(values, shard, Directions(1, 2, 3, 8, **span))
        untouched.append(engine.planned_bytes - engine.observed_bytes)
    # The two large maps lie above what the last layer makes: the last direction's are made only if all is its own.
    assert untouched[0] >= untouched[1] + 4 * 256


def first_values(program: Program) -> list[int]:
    """Where the values of each layer begin."""
    return [0, *accumulate(layer.n_values for layer in program.layers() if layer.n_values)][:-1]


def test_keeping_takes_little_memory_in_a_lenet_and_none_for_its_first_layer(lenet: Case) -> None:
    layers = first_values(lenet.program)
    without, first, kept = (NativeEngine(lenet.program, 1, by_row=True, keep=keep) for keep in ((), (0, 1), layers))
    assert without.planned_bytes == first.planned_bytes
    assert without.planned_bytes < kept.planned_bytes <= without.planned_bytes + 1024
    changed = {name for name, size in kept.planned.parts().items() if size != without.planned.parts()[name]}
    assert changed == {"activations"}


def test_a_budget_counts_what_is_kept(lenet: Case) -> None:
    keep = first_values(lenet.program)
    budget = NativeEngine(lenet.program, batch=7, keep=keep).planned_bytes
    engine = NativeEngine(lenet.program, batch=64, memory_budget=budget, keep=keep)
    assert engine.planned_bytes <= budget
    assert engine.batch >= 7


@some
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    kind=st.sampled_from(["gaussian", "rademacher"]),
    at=st.integers(0, 700),
    size=st.integers(1, 700),
    after=st.integers(0, 50),
    data=st.data(),
)
def test_rebuilding_a_range_is_accumulating_on_its_part_of_the_gradient(
    backend: Backend, counts: list[int], kind: DirectionKind, at: int, size: int, after: int, data: st.DataObject
) -> None:
    parts = [Directions(7, 3, device, count, kind=kind, at=at, size=size) for device, count in enumerate(counts)]
    n, start = at + size + after, data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(0, size - start))
    factors = reference_rng.direction(parts[0], 9, sum(counts))
    gradient, halves = np.full(n, 0.5, np.float32), np.full((len(parts), 2, n), np.nan, np.float32)
    backend.functions.rebuild(gradient, halves, parts, factors, start, length)
    here = slice(at + start, at + start + length)
    expected, used = np.full(length, 0.5, np.float32), 0
    for part, both in zip(parts, halves, strict=True):
        before = expected.copy()
        own = Directions(part.seed, part.round, part.device, part.count, kind=kind)
        backend.functions.accumulate(expected, own, factors[used : used + part.count].copy(), start)
        used += part.count
        np.testing.assert_allclose(both[0, here] + both[1, here], expected - before, rtol=1e-4, atol=1e-5)
        assert np.isnan(np.delete(both, np.r_[here], axis=1)).all()
    assert gradient[here].tobytes() == expected.tobytes()
    assert (np.delete(gradient, np.r_[here]) == 0.5).all()


def test_rebuilding_refuses_ranges_that_differ_or_do_not_fit(backend: Backend) -> None:
    gradient, factors = np.zeros(10, np.float32), np.ones(2, np.float32)
    halves = np.zeros((2, 2, 10), np.float32)

    def rebuild(first: tuple[int, int], second: tuple[int, int], start: int, n: int) -> None:
        parts = [Directions(1, 2, device, 1, at=at, size=size) for device, (at, size) in enumerate((first, second))]
        backend.functions.rebuild(gradient, halves, parts, factors, start, n)

    with pytest.raises(ValuesError, match="expected the same range for all parts"):
        rebuild((0, 5), (5, 5), 0, 5)
    with pytest.raises(ValuesError, match="expected the same range for all parts"):
        rebuild((0, 0), (0, 10), 0, 5)
    with pytest.raises(ValuesError, match="coordinates 1 to 6 of 5, 2 parts"):
        rebuild((5, 5), (5, 5), 1, 5)
    with pytest.raises(ValuesError, match="coordinates 0 to 5 of 5, 2 parts"):
        rebuild((6, 5), (6, 5), 0, 5)
    assert not gradient.any()

"""C = NumPy = torch: every engine runs every program to the same result, within float32 rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.engine import in_parts, native
from foreseed.engine.program import Act
from foreseed.engine.types import Directions
from tests.engine.conftest import Backend
from tests.engine.programs import ULP, Case, Exact, directions, lenet5, programs, random_values, records, torch_logits

batches = st.integers(1, 8)
many = settings(max_examples=200, deadline=None)
some = settings(max_examples=60, deadline=None)


def by_batches(case: Case, batch: int, stats: np.ndarray | None) -> list[Exact]:
    parts = [case.images[first : first + batch] for first in range(0, len(case.images), batch)]
    return [torch_logits(case.program, case.values, part, stats) for part in parts]


def within(given: np.ndarray, exact: np.ndarray, error: np.ndarray) -> bool:
    # The engine's own result is a float32: one more rounding.
    return bool(np.all(np.abs(given - exact) <= error + ULP * np.abs(exact) + 1e-30))


@many
@given(case=programs(), batch=batches, freeze=st.booleans())
def test_logits_are_those_of_torch_within_float32_rounding(
    backend: Backend, case: Case, batch: int, freeze: bool
) -> None:
    stats = case.stats if freeze else None
    logits = np.asarray(backend.engine(case.program, batch=batch).logits(case.values, case.samples, stats))
    exact = by_batches(case, batch, stats)
    assert within(
        logits.reshape(len(case.images), -1),
        np.concatenate([part.logits for part in exact]),
        np.concatenate([part.logits_error for part in exact]),
    )


@some
@given(case=programs(), batch=batches)
def test_loss_is_the_cross_entropy_of_the_logits(backend: Backend, case: Case, batch: int) -> None:
    engine = backend.engine(case.program, batch=batch)
    loss, correct = engine.loss(case.values, case.samples)
    logits = torch.tensor(engine.logits(case.values, case.samples)).view(len(case.images), -1)
    labels = torch.from_numpy(case.labels.astype(np.int64))
    np.testing.assert_allclose(loss, F.cross_entropy(logits.double(), labels, reduction="sum"), rtol=1e-12, atol=1e-12)
    assert correct == int((np.argmax(logits.numpy(), axis=1) == case.labels).sum())


@some
@given(
    case=programs(),
    batch=batches,
    at_once=st.integers(1, 3),
    freeze=st.booleans(),
    d=directions(),
)
def test_probe_is_the_loss_of_the_perturbed_values(
    backend: Backend, case: Case, batch: int, at_once: int, freeze: bool, d: Directions
) -> None:
    stats = case.stats if freeze else None
    engine = backend.engine(case.program, batch=batch, directions=at_once)
    losses = engine.probe(case.values, case.samples, d, stats)
    perturbed = [backend.functions.perturb(case.values, d, k) for k in d.numbers()]
    assert list(losses) == [engine.loss(values, case.samples, stats)[0] for values in perturbed]


@some
@given(
    case=programs(),
    batch=batches,
    k=st.integers(1, 7),
    spread=st.integers(1, 7),
    central=st.booleans(),
    freeze=st.booleans(),
    block=st.integers(1, 4),
    d=directions(),
)
def test_an_answer_is_that_of_single_probes(
    backend: Backend,
    case: Case,
    batch: int,
    k: int,
    spread: int,
    central: bool,
    freeze: bool,
    block: int,
    d: Directions,
) -> None:
    stats = case.stats if freeze else None
    engine = backend.engine(case.program, batch=batch, directions=2)
    asked = Directions(d.seed, d.round, d.device, k, d.first, kind=d.kind, sigma=d.sigma)
    released: list[list[tuple[int, int]]] = [[], []]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "BLOCK", block)
        patch.setattr(in_parts, "BLOCK", block)
        order = case.values, case.samples, asked, min(spread, k), central, stats
        found = engine.differences(*order, lambda *span: released[0].append(span))
        single = in_parts.differences(engine, *order, lambda *span: released[1].append(span))
    assert (found[0].tobytes(), found[1]) == (single[0].tobytes(), single[1])
    assert released[0] == released[1]
    assert sum(count for _, count in released[0]) == case.samples.count


@some
@given(case=programs(), batch=batches)
def test_batch_statistics_are_the_mean_of_those_of_the_batches(backend: Backend, case: Case, batch: int) -> None:
    stats = np.asarray(backend.engine(case.program, batch=batch).batch_stats(case.values, case.samples))
    exact = by_batches(case, batch, None)
    shares = np.array([len(part.logits) for part in exact]) / len(case.images)
    mean, error = (
        np.tensordot(shares, [getattr(part, name) for part in exact], 1) for name in ("stats", "stats_error")
    )
    assert len(stats) == case.program.n_stats
    assert within(stats, mean, error)


@some
@given(case=programs(), batch=batches)
def test_statistics_of_one_batch_frozen_give_its_logits_again(backend: Backend, case: Case, batch: int) -> None:
    engine = backend.engine(case.program, batch=8)
    frozen = np.asarray(engine.batch_stats(case.values, case.samples))
    logits = np.asarray(backend.engine(case.program, batch=batch).logits(case.values, case.samples, frozen))
    exact = torch_logits(case.program, case.values, case.images, frozen)
    assert within(logits.reshape(exact.logits.shape), exact.logits, exact.logits_error)


def test_lenet5_agrees_to_a_hundred_thousandth_dense_and_sparse(backend: Backend) -> None:
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (20, 3, 32, 32), np.uint8)
    samples = records(images, rng.integers(0, 10, 20, np.uint8))
    dense = lenet5(act=Act.HARDSWISH)
    live = [np.flatnonzero(rng.random(layer.n_dense) < 0.1).tolist() for layer in dense.layers()]
    for program in (dense, lenet5(live, Act.HARDSWISH)):
        values = random_values(program, rng)
        exact = torch_logits(program, values, images, None)
        logits = np.asarray(backend.engine(program).logits(values, samples)).reshape(20, 10)
        assert np.abs(exact.logits).max() > 0.1
        np.testing.assert_allclose(logits, exact.logits, rtol=0, atol=1e-5)

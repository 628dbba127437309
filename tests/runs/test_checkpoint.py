"""Checkpoints hold any method's state, and refuse what they cannot hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.engine import ForeseedError, Program
from foreseed.methods import UNSAVED
from foreseed.models import build, compile
from foreseed.prune import foresight
from foreseed.runs import checkpoint


@dataclass
class Inner:
    count: int
    rate: float


@dataclass
class State:
    program: Program
    values: Any
    vectors: list[Any]
    log: list[bytes]
    inner: Inner
    word: bytes
    ema: Any
    helper: object = field(metadata=UNSAVED)


def program(density: float) -> Program:
    model = build("lenet5", (1, 16, 16), 4)
    return compile(
        model, foresight(model, density, pruner="random", input_shape=(1, 16, 16)).mask, input_shape=(1, 16, 16)
    )[0]


def test_every_kind_of_field_comes_back_the_same(tmp_path: Path) -> None:
    dense, sparse = program(0.5), program(0.1)
    saved = State(
        sparse, np.arange(3, dtype=np.float32), [np.ones(2, np.float32), np.zeros(2, np.float32)], [b"ab", b"", b"cde"],
        Inner(7, 0.25), b"xyz", np.full(3, 2.0, np.float32), "left out",
    )  # fmt: skip
    checkpoint.save(tmp_path / "state.npz", 12, saved)
    fresh = State(dense, np.zeros(9, np.float32), [], [], Inner(0, 0.0), b"", None, "as it was made")
    # A list's kind of members is told by what was saved, the rest by what `init` made.
    assert checkpoint.restore(tmp_path / "state.npz", fresh) == 12
    assert fresh.program.bytes == sparse.bytes
    assert [layer.name for layer in fresh.program.layers()] == [layer.name for layer in sparse.layers()]
    np.testing.assert_array_equal(fresh.values, saved.values)
    np.testing.assert_array_equal(fresh.vectors, saved.vectors)
    assert (fresh.log, fresh.inner, fresh.word, fresh.helper) == (saved.log, Inner(7, 0.25), b"xyz", "as it was made")
    np.testing.assert_array_equal(fresh.ema, saved.ema)
    assert type(fresh.inner.count) is int


def test_a_program_that_has_not_changed_stays_the_very_same(tmp_path: Path) -> None:
    held = program(0.5)
    state = State(held, np.zeros(1), [], [], Inner(0, 0.0), b"", None, None)
    checkpoint.save(tmp_path / "state.npz", 1, state)
    checkpoint.restore(tmp_path / "state.npz", state)
    assert state.program is held
    assert state.ema is None


def test_what_no_checkpoint_can_hold_is_refused_by_its_name(tmp_path: Path) -> None:
    state = State(program(0.5), {"a": 1}, [], [], Inner(0, 0.0), b"", None, None)
    with pytest.raises(TypeError, match=r"state\.values of a method's state is a dict"):
        checkpoint.save(tmp_path / "state.npz", 1, state)


def test_a_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    @dataclass
    class Other:
        count: int

    checkpoint.save(tmp_path / "state.npz", 1, Other(3))
    fresh = State(program(0.5), np.zeros(1), [np.zeros(1)], [], Inner(0, 0.0), b"", None, None)
    with pytest.raises(ForeseedError, match="not a checkpoint that can be read"):
        checkpoint.restore(tmp_path / "state.npz", fresh)

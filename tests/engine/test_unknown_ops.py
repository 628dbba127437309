"""Whoever walks a program's ops refuses what it does not know: nothing is taken for something else."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foreseed.bench.onnx_graph import onnx_model
from foreseed.engine.errors import ProgramError
from foreseed.engine.program import Act, Kind, Op, Pool, Program, assemble
from foreseed.engine.reference import ReferenceEngine
from foreseed.engine.types import Samples
from foreseed.meter import planned_bp_bytes
from foreseed.meter.backprop_device import logits

WEIGHTS = (3, 1, 2, 2)


def changed_program(at: int = 0, **changes: Any) -> Program:
    """A conv with an activation and a pool, then a ReLU; op `at` is changed behind the back of all checks."""
    conv = Op(Kind.CONV, 0, channels=3, groups=1, window=(2, 2, 1, 1, 0, 0), act=Act.RELU)
    ops = [replace(conv, pool=Pool.MAX, pool_window=(1, 1, 1, 1, 0, 0)), Op(Kind.ACT, 1, act=Act.RELU)]
    program = assemble((1, 2, 2), 3, [0.01], [0.0], ops, [None, None], ["conv", "act"])
    program.ops = tuple(replace(op, **changes) if i == at else op for i, op in enumerate(program.ops))
    return program


def run_reference(program: Program) -> None:
    # The engine checks a program when it is made.
    changed, program.ops = program.ops, Program(program.bytes).ops
    engine = ReferenceEngine(program)
    program.ops = changed
    engine.loss(array("f", [0.5] * program.n_live), Samples.records(bytes(5), 4))


def run_backprop(program: Program) -> None:
    logits(program, [[torch.zeros(WEIGHTS)], []], torch.zeros(1, *program.input_shape))


def run_memory(program: Program) -> None:
    planned_bp_bytes(program, 1, momentum=False)


def run_onnx(program: Program) -> None:
    onnx_model(program, {"conv.weight": np.zeros(WEIGHTS, np.float32)}, as_inputs=True)


WALKERS = [run_reference, run_backprop, run_memory, run_onnx]


@pytest.mark.parametrize("walk", WALKERS)
def test_known_ops_are_walked(walk: Callable[[Program], None]) -> None:
    walk(changed_program())


@pytest.mark.parametrize("walk", WALKERS)
@pytest.mark.parametrize(
    ("at", "field", "said"), [(1, "kind", "op kind 9"), (0, "act", "activation 9"), (0, "pool", "pool 9")]
)
def test_unknown_parts_are_refused(walk: Callable[[Program], None], at: int, field: str, said: str) -> None:
    with pytest.raises(ProgramError, match=rf"^{said} is not known to .*; compile a model without it"):
        walk(changed_program(at, **{field: 9}))


def test_batch_norms_are_not_taken_for_group_norms_in_onnx() -> None:
    with pytest.raises(ProgramError, match="op kind 'batch norm' is not known to the ONNX graph"):
        run_onnx(changed_program(1, kind=Kind.NORM, eps=1.0))

"""A program that breaks a rule of `docs/format.md` is refused by every engine before it runs."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.engine.errors import BudgetError, ForeseedError, ProgramError
from foreseed.engine.program import DENSE, Act, Kind, Op, Pool, Program, assemble
from foreseed.engine.reference_check import check_program
from tests.engine.conftest import Backend
from tests.engine.programs import Case, programs

CONV, BATCH_NORM, GROUP_NORM, ACT, ADD, POOL, LINEAR = range(7)
OPS_AT = 32 + 8 * 2


def good() -> Program:
    """A program with an op of each kind; its first conv is sparse and pools."""
    halve = (2, 2, 2, 2, 1, 1)
    ops = [
        Op(Kind.CONV, 0, act=Act.RELU, flags=1, channels=4, groups=1, window=(3, 3, 1, 1, 1, 1),
           pool=Pool.MAX, pool_window=halve),
        Op(Kind.NORM, 1, flags=1, eps=0.5),
        Op(Kind.NORM, 2, groups=2, eps=0.5),
        Op(Kind.ACT, 3, act=Act.HARDSWISH),
        Op(Kind.ADD, 4, b=2),
        Op(Kind.POOL, 5, pool=Pool.AVERAGE, pool_window=halve),
        Op(Kind.CONV, 6, channels=3, groups=1, window=(3, 3, 1, 1, 0, 0)),
    ]  # fmt: skip
    live = [[1, 8, 30, 31, 70], *[None] * 6]
    return assemble((2, 6, 6), 3, [1.0] * 2, [0.0] * 2, ops, live)


def with_op(number: int, **fields: Any) -> bytes:
    program = good()
    at = OPS_AT + 40 * number
    record = replace(program.ops[number], **fields).encode()
    return program.bytes[:at] + record + program.bytes[at + 40 :]


def with_header(at: int, layout: str, *fields: Any) -> bytes:
    data = bytearray(good().bytes)
    struct.pack_into(layout, data, at, *fields)
    return bytes(data)


BROKEN = {
    "a conv reads itself": (with_op(CONV, a=1), "op 0"),
    "an add reads a later tensor": (with_op(ADD, b=5), "op 4"),
    "conv with unknown flags": (with_op(CONV, flags=3), "op 0"),
    "conv with a second tensor": (with_op(LINEAR, b=1), "op 6"),
    "conv with eps": (with_op(CONV, eps=0.5), "op 0"),
    "conv with minus zero for eps": (with_op(CONV, eps=-0.0), "op 0"),
    "conv without channels": (with_op(CONV, channels=0), "op 0"),
    "conv without groups": (with_op(CONV, groups=0), "op 0"),
    "conv with groups that do not divide its input": (with_op(CONV, groups=4), "op 0"),
    "conv with groups that do not divide its output": (with_op(LINEAR, groups=2), "op 6"),
    "conv with an unknown Rice parameter": (with_op(CONV, rice=16), "op 0"),
    "dense conv with too few weights": (with_op(CONV, rice=DENSE), "op 0"),
    "dense conv with too many weights": (with_op(LINEAR, n_weights=109), "op 6"),
    "sparse conv with too many weights": (with_op(CONV, n_weights=73), "op 0"),
    "conv with an empty kernel": (with_op(CONV, window=(0, 3, 1, 1, 1, 1)), "op 0"),
    "conv without stride": (with_op(CONV, window=(3, 3, 1, 0, 1, 1)), "op 0"),
    "conv with a kernel that does not fit": (with_op(LINEAR, window=(3, 4, 1, 1, 0, 0)), "op 6"),
    "conv with a window for no pool": (with_op(CONV, pool=Pool.NONE), "op 0"),
    "conv with a pool without window": (with_op(CONV, pool_window=(0,) * 6), "op 0"),
    "pool padded by more than half its kernel": (with_op(POOL, pool_window=(3, 2, 2, 2, 2, 1)), "op 5"),
    "pool without stride": (with_op(POOL, pool_window=(2, 2, 2, 0, 1, 1)), "op 5"),
    "pool that does not fit": (with_op(POOL, pool_window=(9, 2, 2, 2, 2, 1)), "op 5"),
    "pool of no kind": (with_op(POOL, pool=Pool.NONE), "op 5"),
    "pool of no kind and no window": (with_op(POOL, pool=Pool.NONE, pool_window=(0,) * 6), "op 5"),
    "pool with an activation": (with_op(POOL, act=Act.RELU), "op 5"),
    "pool with flags": (with_op(POOL, flags=1), "op 5"),
    "pool with groups": (with_op(POOL, groups=1), "op 5"),
    "norm with unknown flags": (with_op(GROUP_NORM, flags=2), "op 2"),
    "norm with eps 0": (with_op(GROUP_NORM, eps=0.0), "op 2"),
    "norm with negative eps": (with_op(GROUP_NORM, eps=-1e-5), "op 2"),
    "norm with eps that is no number": (with_op(BATCH_NORM, eps=nan), "op 1"),
    "norm with infinite eps": (with_op(BATCH_NORM, eps=inf), "op 1"),
    "norm with groups that do not divide": (with_op(GROUP_NORM, groups=3), "op 2"),
    "norm with more groups than channels": (with_op(GROUP_NORM, groups=8), "op 2"),
    "norm with a second tensor": (with_op(GROUP_NORM, b=1), "op 2"),
    "norm with channels": (with_op(GROUP_NORM, channels=4), "op 2"),
    "norm with a kernel": (with_op(GROUP_NORM, window=(1, 1, 1, 1, 0, 0)), "op 2"),
    "norm with a pool": (with_op(GROUP_NORM, pool=Pool.MAX, pool_window=(1, 1, 1, 1, 0, 0)), "op 2"),
    "norm with a Rice parameter": (with_op(GROUP_NORM, rice=1), "op 2"),
    "norm with weights": (with_op(GROUP_NORM, n_weights=1), "op 2"),
    "act with a second tensor": (with_op(ACT, b=1), "op 3"),
    "act with flags": (with_op(ACT, flags=1), "op 3"),
    "act with eps": (with_op(ACT, eps=0.5), "op 3"),
    "add of different shapes": (with_op(ADD, b=0), "op 4"),
    "add with groups": (with_op(ADD, groups=1), "op 4"),
    "a reserved byte of an op": (with_header(OPS_AT + 31, "B", 1), "op 0"),
    "an unknown kind": (with_header(OPS_AT + 40 * ACT, "B", 6), "op 3"),
    "an unknown activation": (with_header(OPS_AT + 1, "B", 3), "op 0"),
    "an unknown pool": (with_header(OPS_AT + 24, "B", 4), "op 0"),
    "no classes": (with_header(14, "<H", 0), "classes"),
    "too many classes": (with_header(14, "<H", 257), "classes"),
    "other classes than logits": (with_header(14, "<H", 4), "ends with"),
    "an input without rows": (with_header(10, "<H", 0), "input"),
    "an input so large that the map is not the logits": (with_header(10, "<H", 16), "ends with"),
    "too few values": (with_header(16, "<I", 103), "values"),
    "too many values": (with_header(16, "<I", 200), "values"),
    "other statistics": (with_header(20, "<I", 0), "statistics"),
    "a reserved word of the header": (with_header(28, "<I", 1), "header"),
    "no ops": (with_header(6, "<H", 0), "ops"),
    "version 0": (with_header(4, "<H", 0), "version"),
    "a scale that is no number": (with_header(32, "<f", nan), "scale"),
    "an infinite shift": (with_header(44, "<f", inf), "shift"),
}


def wide_input(channels: int) -> bytes:
    ops = [Op(Kind.POOL, 0, pool=Pool.MAX, pool_window=(1, 1, 1, 1, 0, 0))]
    return assemble((channels, 1, 1), channels, [1.0] * channels, [0.0] * channels, ops, [None]).bytes


def one_conv(shape: tuple[int, int, int], classes: int, window: tuple[int, ...], **pool: Any) -> bytes:
    op = Op(Kind.CONV, 0, channels=classes, groups=1, window=window, **pool)
    return assemble(shape, classes, [1.0] * shape[0], [0.0] * shape[0], [op], [[]]).bytes


LIMITS = {
    "65 channels": wide_input(65),
    "an input of more than 2^28 numbers": one_conv((1, 65_535, 5_000), 1, (65_535, 5_000, 1, 1, 0, 0)),
    "a layer of more than 2^28 weights": one_conv((64, 200, 200), 200, (200, 200, 1, 1, 0, 0)),
    "an input of more than 2^28 numbers with its padding": one_conv((64, 1, 1), 1, (1, 1, 9000, 9000, 2000, 2000)),
    "a map of more than 65,535 columns": one_conv(
        (1, 1, 2), 1, (1, 1, 1, 1, 0, 65_535), pool=Pool.MAX, pool_window=(1, 255, 1, 255, 0, 0)
    ),
}


def engine_takes(backend: Backend, data: bytes) -> bool:
    """Whether the engine accepts the program, whatever memory it would need."""
    try:
        backend.engine(Program(data), batch=1, memory_budget=2**24)
    except BudgetError:
        return True
    except ProgramError:
        return False
    return True


def test_the_unbroken_program_is_taken(backend: Backend) -> None:
    assert engine_takes(backend, good().bytes)


@pytest.mark.parametrize("rule", BROKEN)
def test_a_program_that_breaks_a_rule_is_refused(backend: Backend, rule: str) -> None:
    data, said = BROKEN[rule]
    assert not engine_takes(backend, data)
    with pytest.raises(ProgramError, match=said):
        check_program(Program(data))


@pytest.mark.parametrize("limit", LIMITS)
def test_a_program_beyond_a_limit_is_refused(backend: Backend, limit: str) -> None:
    assert not engine_takes(backend, LIMITS[limit])


def structured(code: bytes, n_weights: int) -> bytes:
    """A sparse linear layer of ten weights, Rice parameter 1, with this structure."""
    op = Op(Kind.CONV, 0, channels=1, groups=1, window=(1, 10, 1, 1, 0, 0))
    data = bytearray(assemble((1, 1, 10), 1, [1.0], [0.0], [op], [[]]).bytes)
    data[40:80] = replace(op, rice=1, n_weights=n_weights).encode()
    struct.pack_into("<I", data, 16, n_weights)
    struct.pack_into("<I", data, 24, len(code))
    return bytes(data) + code


@pytest.mark.parametrize(
    ("code", "n_weights", "taken"),
    [
        (bytes([0b0110_0101]), 3, True),  # gaps 0, 0 and 3, lowest bits first: 1 0, 1 0, 0 1 1, and a bit to fill
        (bytes([0b01]), 1, True),
        (bytes([0b101]), 1, False),  # a bit after the last gap
        (bytes([0b01, 0]), 1, False),  # a byte after it
        (b"", 1, False),
        (bytes([0]), 1, False),
        (bytes([0b1000_0000]), 1, False),  # the low bit of the gap is missing
        (bytes([0b11_0000]), 1, True),  # index 9
        (bytes([0b01_10_0000]), 1, False),  # index 10
        (bytes([0x55, 0x55, 0b0101]), 10, True),  # every weight, by a code
        (b"", 0, True),
        (bytes([0]), 0, False),
    ],
)
def test_a_structure_must_be_exact(backend: Backend, code: bytes, n_weights: int, taken: bool) -> None:
    assert engine_takes(backend, structured(code, n_weights)) is taken


@settings(max_examples=300, deadline=None)
@given(case=programs(), data=st.data())
def test_engines_accept_and_refuse_the_same_programs(backend: Backend, case: Case, data: st.DataObject) -> None:
    damaged = bytearray(case.program.bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        byte = st.one_of(st.sampled_from([0, 1, 2, 3, 254, 255]), st.integers(0, 255))
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(byte)
    try:
        check_program(Program(bytes(damaged)))
    except ProgramError:
        assert not engine_takes(backend, bytes(damaged))
        return
    assert engine_takes(backend, bytes(damaged))
    with suppress(ForeseedError):
        backend.engine(Program(bytes(damaged)), memory_budget=2**24).loss(case.values, case.samples)

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
from foreseed.engine.ops import CEIL, SHARED
from foreseed.engine.program import DENSE, Act, Kind, Op, Pool, Program, assemble
from foreseed.engine.reference_check import check_program
from tests.engine.conftest import Backend
from tests.engine.programs import Case, programs

CONV, BATCH_NORM, GROUP_NORM, ACT, ADD, POOL, LINEAR = range(7)
(WIDE, AGAIN, NORM, NORM_AGAIN, LEAKY, CHANNELS, PRODUCT, JOINED, PADDED, SMALLER, CEILED, LAST) = range(12)
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


def newer() -> Program:
    """A program of version 2: layers used twice, and an op of each kind and pool that version 1 lacks."""
    ops = [
        Op(Kind.CONV, 0, act=Act.GELU, flags=1, channels=2, groups=1, window=(2, 3, 1, 1, 2, 2), dilation=(3, 2)),
        Op(Kind.CONV, 1, flags=1 | SHARED, rice=0, channels=2, groups=1, window=(2, 3, 2, 2, 1, 1)),
        Op(Kind.NORM, 2, flags=1, groups=2, eps=0.5),
        Op(Kind.NORM, 3, flags=1 | SHARED, rice=2, groups=2, eps=0.25, act=Act.TANH),
        Op(Kind.ACT, 4, act=Act.LEAKY_RELU, slope=0.5),
        Op(Kind.POOL, 5, pool=Pool.AVERAGE, pool_window=(4, 3, 4, 3, 0, 0)),
        Op(Kind.MUL, 5, b=6, act=Act.RELU6),
        Op(Kind.CAT, 7, b=5),
        Op(Kind.PAD, 8, window=(1, 0, 2, 1, 0, 0)),
        Op(Kind.POOL, 9, pool=Pool.ADAPTIVE, pool_window=(4, 3, 0, 0, 0, 0)),
        Op(Kind.POOL, 10, flags=CEIL, pool=Pool.MAX, pool_window=(3, 2, 2, 2, 0, 0)),
        Op(Kind.CONV, 11, channels=3, groups=1, window=(2, 2, 1, 1, 0, 0)),
    ]
    return assemble((2, 6, 6), 3, [1.0] * 2, [0.0] * 2, ops, [[1, 3, 8, 20], *[None] * 11])


def with_op(number: int, program: Program | None = None, **fields: Any) -> bytes:
    program = program or good()
    at = OPS_AT + 40 * number
    record = replace(program.ops[number], **fields).encode()
    return program.bytes[:at] + record + program.bytes[at + 40 :]


def with_newer(number: int, **fields: Any) -> bytes:
    return with_op(number, newer(), **fields)


def with_header(at: int, layout: str, *fields: Any) -> bytes:
    data = bytearray(good().bytes)
    struct.pack_into(layout, data, at, *fields)
    return bytes(data)


BROKEN = {
    "a conv reads itself": (with_op(CONV, a=1), "op 0"),
    "an add reads a later tensor": (with_op(ADD, b=5), "op 4"),
    "conv with unknown flags": (with_op(CONV, flags=9), "op 0"),
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
    "an unknown kind": (with_header(OPS_AT + 40 * ACT, "B", 9), "op 3"),
    "an unknown activation": (with_header(OPS_AT + 1, "B", 11), "op 0"),
    "an unknown pool": (with_header(OPS_AT + 24, "B", 5), "op 0"),
    "an activation of version 2": (with_op(ACT, act=Act.SIGMOID), "op 3"),
    "a kind of version 2": (with_op(ADD, kind=Kind.MUL), "op 4"),
    "ceil mode in version 1": (with_op(POOL, flags=CEIL), "op 5"),
    "dilation in version 1": (with_op(CONV, dilation=(2, 1), window=(3, 3, 1, 1, 2, 1)), "op 0"),
    "ceil mode of no pool": (with_newer(LAST, flags=CEIL), "op 11"),
    "ceil mode of an adaptive pool": (with_newer(SMALLER, flags=CEIL), "op 9"),
    "an adaptive pool with a stride": (with_newer(SMALLER, pool_window=(4, 3, 1, 0, 0, 0)), "op 9"),
    "an adaptive pool to no rows": (with_newer(SMALLER, pool_window=(0, 3, 0, 0, 0, 0)), "op 9"),
    "a dilated kernel that does not fit": (with_newer(LAST, dilation=(2, 1)), "op 11"),
    "values shared with an op to come": (with_newer(WIDE, flags=1 | SHARED, rice=1), "op 0"),
    "values shared with itself": (with_newer(AGAIN, rice=1), "op 1"),
    "values shared with an op of another kind": (with_newer(NORM_AGAIN, rice=0), "op 3"),
    "values shared with one that shares": (with_newer(LAST, flags=SHARED, rice=1), "op 11"),
    "values shared without their bias": (with_newer(AGAIN, flags=SHARED), "op 1"),
    "values shared of another kernel": (with_newer(AGAIN, window=(3, 2, 2, 2, 1, 1)), "op 1"),
    "values shared of another number": (with_newer(AGAIN, n_weights=5), "op 1"),
    "values shared of another layer's width": (with_newer(AGAIN, channels=4), "op 1"),
    "values shared of other groups": (with_newer(NORM_AGAIN, groups=1), "op 3"),
    "values shared by a sum": (with_newer(PRODUCT, flags=SHARED), "op 6"),
    "a slope that is no number": (with_newer(LEAKY, slope=nan), "op 4"),
    "a slope of an act that has none": (with_header(OPS_AT + 40 * ACT + 36, "<f", 0.5), "op 3"),
    "a LeakyReLU in a norm": (with_newer(NORM, act=Act.LEAKY_RELU), "op 2"),
    "a product of other shapes": (with_newer(PRODUCT, a=6, b=5), "op 6"),
    "maps of two sizes joined": (with_newer(JOINED, b=6), "op 7"),
    "a join with an activation": (with_newer(JOINED, act=Act.RELU), "op 7"),
    "a padding with an activation": (with_newer(PADDED, act=Act.RELU), "op 8"),
    "a padding with a second tensor": (with_newer(PADDED, b=1), "op 8"),
    "a padding with more numbers": (with_newer(PADDED, window=(1, 0, 2, 1, 1, 0)), "op 8"),
    "a padding beyond what a map has": (with_newer(PADDED, window=(0, 65535, 3, 0, 0, 0)), "op 8"),
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


@pytest.mark.parametrize("program", [good(), newer()])
def test_the_unbroken_program_is_taken(backend: Backend, program: Program) -> None:
    assert engine_takes(backend, program.bytes)


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

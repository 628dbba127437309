"""The rules of `docs/format.md` that a program must keep before any engine runs it."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isfinite, prod

from foreseed.engine.errors import ProgramError
from foreseed.engine.program import DENSE, Kind, Op, Pool, Program

Shape = tuple[int, int, int]
Window = tuple[int, int, int, int, int, int]

_HEADER_BYTES, _OP_BYTES = 32, 40
_MOST, _LONGEST = 2**28, 2**16 - 1
_ALWAYS = {"kind", "a"}
_USED = {
    Kind.CONV: _ALWAYS | {"act", "flags", "rice", "channels", "groups", "window", "pool", "pool_window", "n_weights"},
    Kind.POOL: _ALWAYS | {"pool", "pool_window"},
    Kind.NORM: _ALWAYS | {"act", "flags", "groups", "eps"},
    Kind.ADD: _ALWAYS | {"act", "b"},
    Kind.ACT: _ALWAYS | {"act"},
}


def check_program(program: Program) -> None:
    """Refuse a program that breaks any rule of `docs/format.md`, naming the op."""
    c, h, w = program.input_shape
    _demand(1 <= c <= 64 and h >= 1 and w >= 1, f"an input of {c}x{h}x{w}: expected 1 to 64 channels of at least 1x1")
    _check_map(program.input_shape, "input")
    _demand(1 <= program.classes <= 256, f"{program.classes} classes: expected 1 to 256")
    _demand(all(map(isfinite, program.scale + program.shift)), "its input scale or shift is not finite")
    shapes = program.shapes()
    for i, op in enumerate(program.ops):
        _check_op(program, i, op, shapes)
    _demand(shapes[-1] == (program.classes, 1, 1), f"it ends with {shapes[-1]}: expected {(program.classes, 1, 1)}")
    values = sum(layer.n_values for layer in program.layers())
    stats = sum(n_stats(op, shapes[op.a]) for op in program.ops)
    _demand(program.n_live == values, f"it announces {program.n_live} values: its ops have {values}")
    _demand(program.n_stats == stats, f"it announces {program.n_stats} statistics: its ops have {stats}")
    _check_structure(program)


def _check_op(program: Program, i: int, op: Op, shapes: list[Shape]) -> None:
    shape, what = shapes[op.a], f"op {i} ({op.kind.name.lower()})"
    at = _HEADER_BYTES + 8 * program.input_shape[0] + _OP_BYTES * i
    meant = Op(**{field: value for field, value in op.__dict__.items() if field in _USED[op.kind]})
    _demand(meant.encode() == program.bytes[at : at + _OP_BYTES], f"{what}: a field that it does not use is not 0")
    _demand(op.flags <= 1, f"{what}: flags {op.flags}: expected 0 or 1")
    _check_map(shapes[i + 1], what)
    if op.kind is Kind.CONV:
        _check_conv(op, shape, what)
    elif op.kind is Kind.NORM:
        _demand(0 < op.eps < inf, f"{what}: eps {op.eps}: expected a positive number")
        _demand(not op.groups or shape[0] % op.groups == 0, f"{what}: {op.groups} groups of {shape[0]} channels")
    elif op.kind is Kind.ADD:
        _demand(shape == shapes[op.b], f"{what}: it adds {shape} and {shapes[op.b]}: expected equal shapes")
    elif op.kind is Kind.POOL:
        _demand(op.pool is not Pool.NONE, f"{what}: it says how to pool nowhere")
    kh, kw, _, _, ph, pw = op.pool_window
    _demand(op.pool is not Pool.NONE or not any(op.pool_window), f"{what}: a window {op.pool_window} and no pool")
    _demand(2 * ph <= kh and 2 * pw <= kw, f"{what}: pool padding {ph}x{pw}: expected at most half of {kh}x{kw}")


def _check_conv(op: Op, shape: Shape, what: str) -> None:
    c, groups = shape[0], op.groups
    _demand(op.channels >= 1, f"{what}: no output channels")
    fits = groups >= 1 and c % groups == 0 and op.channels % groups == 0
    _demand(fits, f"{what}: {groups} groups of {c} and {op.channels} channels: expected a divisor of both")
    size = prod(padded_shape(shape, op.window))
    _demand(size <= _MOST, f"{what}: its input with the padding has {size} numbers: expected at most {_MOST}")
    _check_map(conv_shape(op, shape), what)
    n_dense = op.channels * (c // groups) * op.window[0] * op.window[1]
    _demand(n_dense <= _MOST, f"{what}: {n_dense} weights: expected at most {_MOST}")
    _demand(op.rice <= 15 or op.rice == DENSE, f"{what}: Rice parameter {op.rice}: expected 0 to 15, or 255")
    live = op.n_weights == n_dense if op.rice == DENSE else op.n_weights <= n_dense
    _demand(live, f"{what}: {op.n_weights} live weights of {n_dense}")


def _check_map(shape: Shape, what: str) -> None:
    fits = prod(shape) <= _MOST and max(shape) <= _LONGEST
    _demand(fits, f"{what}: a map of {shape}: expected sides up to {_LONGEST} and at most {_MOST} numbers")


def _check_structure(program: Program) -> None:
    """Each layer's code must end where its last gap ends, filled with zero bits, and the last code with the program."""
    at = _HEADER_BYTES + 8 * program.input_shape[0] + _OP_BYTES * len(program.ops)
    for i, live in program.live():
        rice = program.ops[i].rice
        if rice != DENSE:
            bits = sum((index - previous - 1 >> rice) + 1 + rice for previous, index in pairwise([-1, *live]))
            at += -(-bits // 8)
            filled = bits % 8 == 0 or program.bytes[at - 1] >> bits % 8 == 0
            _demand(filled, f"op {i} (conv): the last byte of its structure is not filled with zero bits")
    _demand(at == len(program.bytes), f"{len(program.bytes) - at} bytes follow the structure of its last conv")


def _demand(rule_holds: bool, otherwise: str) -> None:
    if not rule_holds:
        raise ProgramError(f"this program breaks the format: {otherwise}; compile it again or get a good copy")


def conv_shape(op: Op, shape: Shape) -> Shape:
    """What a conv makes before its pool."""
    _, h, w = padded_shape(shape, op.window)
    kh, kw, sh, sw, _, _ = op.window
    return op.channels, (h - kh) // sh + 1, (w - kw) // sw + 1


def padded_shape(shape: Shape, window: Window) -> Shape:
    return shape[0], shape[1] + 2 * window[4], shape[2] + 2 * window[5]


def n_stats(op: Op, shape: Shape) -> int:
    return 2 * shape[0] if op.kind is Kind.NORM and not op.groups else 0

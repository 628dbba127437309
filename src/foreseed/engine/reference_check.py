"""The rules of `docs/format.md` that a program must keep before any engine runs it."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, prod

from foreseed.engine.errors import ProgramError
from foreseed.engine.head import HEADER
from foreseed.engine.ops import CEIL, DENSE, LARGEST, OP, Op, Pool, Shape
from foreseed.engine.parts import KINDS
from foreseed.engine.program import Program
from foreseed.engine.walker import Place

_LONGEST = 2**16 - 1
_ALWAYS = {"kind", "a"}


def check_program(program: Program) -> None:
    """Refuse a program that breaks any rule of `docs/format.md`, naming the op."""
    c, h, w = program.input_shape
    _demand(1 <= c <= 64 and h >= 1 and w >= 1, f"an input of {c}x{h}x{w}: expected 1 to 64 channels of at least 1x1")
    _check_map(program.input_shape, "input")
    _demand(1 <= program.classes <= 256, f"{program.classes} classes: expected 1 to 256")
    _demand(all(map(isfinite, program.scale + program.shift)), "its input scale or shift is not finite")
    for place in program.places:
        _check_op(program, place)
    made = program.shapes()[-1]
    _demand(made == (program.classes, 1, 1), f"it ends with {made}: expected {(program.classes, 1, 1)}")
    values, stats = sum(layer.n_values for layer in program.layers()), sum(p.n_stats for p in program.places)
    _demand(program.n_live == values, f"it announces {program.n_live} values: its ops have {values}")
    _demand(program.n_stats == stats, f"it announces {program.n_stats} statistics: its ops have {stats}")
    _check_structure(program)


def _check_op(program: Program, place: Place) -> None:
    op, i, what = place.op, place.number, f"op {place.number} ({place.op.kind.name.lower()})"
    at = HEADER.size + 8 * program.input_shape[0] + OP.size * i
    kind, used = KINDS[op.kind], _ALWAYS | KINDS[op.kind].fields
    _demand(op.version <= program.version, f"{what}: needs version {op.version} of the format, not {program.version}")
    meant = Op(**{field: value for field, value in op.__dict__.items() if field in used})
    _demand(meant.encode() == program.bytes[at : at + OP.size], f"{what}: a field that it does not use is not 0")
    _demand(not op.flags & ~kind.flags, f"{what}: flags {op.flags}: expected only bits of {kind.flags}")
    _demand(isfinite(op.slope), f"{what}: a slope of {op.slope}: expected a finite number")
    if op.owner is not None:
        _check_owner(program, place, what)
    for stage in place.stages:
        _check_map(stage.made, what)
    for holds, otherwise in kind.rules(op, place.reads):
        _demand(holds, f"{what}: {otherwise}")
    kh, kw, *_, ph, pw = op.pool_window
    slides = op.pool not in (Pool.NONE, Pool.ADAPTIVE)
    unused = op.pool_window if op.pool is Pool.NONE else op.pool_window[2:]
    _demand(slides or not any(unused), f"{what}: a window {op.pool_window} that its pool does not use")
    _demand(slides or not op.flags & CEIL, f"{what}: ceil mode, but no pool that slides")
    _demand(2 * ph <= kh and 2 * pw <= kw, f"{what}: pool padding {ph}x{pw}: expected at most half of {kh}x{kw}")


def _check_owner(program: Program, place: Place, what: str) -> None:
    """Values that an earlier op has: of the same kind and shape, and its own."""
    op, number = place.op, place.op.owner
    if number is None or number >= place.number:
        raise _broken(f"{what}: it shares the values of op {number}, which is not before it")
    owner = program.places[number]
    alike = [(o.kind, o.has_parameters, o.channels, o.groups, o.n_weights, o.window[:2]) for o in (op, owner.op)]
    same = alike[0] == alike[1] and place.reads[0][0] == owner.reads[0][0] and owner.op.owner is None
    _demand(same, f"{what}: it shares the values of op {number}, which has others")


def _check_map(shape: Shape, what: str) -> None:
    fits = prod(shape) <= LARGEST and max(shape) <= _LONGEST
    _demand(fits, f"{what}: a map of {shape}: expected sides up to {_LONGEST} and at most {LARGEST} numbers")


def _check_structure(program: Program) -> None:
    """Each layer's code must end where its last gap ends, filled with zero bits, and the last code with the program."""
    at = HEADER.size + 8 * program.input_shape[0] + OP.size * len(program.ops)
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
        raise _broken(otherwise)


def _broken(otherwise: str) -> ProgramError:
    return ProgramError(f"this program breaks the format: {otherwise}; compile it again or get a good copy")

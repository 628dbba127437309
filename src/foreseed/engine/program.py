"""Programs: the immutable half of a pruned model, and the file that holds it (`docs/format.md`)."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from foreseed.engine.errors import ProgramError, ValuesError
from foreseed.engine.files import write_whole
from foreseed.engine.head import HEADER, PROGRAM_MAGIC, VERSION, ProgramHead

FILE_MAGIC = b"\x89FSP\r\n\x1a\n"
DENSE = 255

_FILE_HEADER = struct.Struct("<8sHHIIII")
_OP = struct.Struct("<BBBBHHHH6HB6BBIf")


class Kind(IntEnum):
    """What an op does."""

    CONV = 1
    POOL = 2
    NORM = 3
    ADD = 4
    ACT = 5


class Act(IntEnum):
    """The activation an op applies to its result."""

    NONE = 0
    RELU = 1
    HARDSWISH = 2


class Pool(IntEnum):
    """How a pooling window is reduced."""

    NONE = 0
    MAX = 1
    AVERAGE = 2
    AVERAGE_INSIDE = 3


@dataclass(frozen=True)
class Op:
    """One op of a program; the fields are those of `docs/format.md`."""

    kind: Kind
    a: int
    b: int = 0
    act: Act = Act.NONE
    flags: int = 0
    rice: int = 0
    channels: int = 0
    groups: int = 0
    window: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    pool: Pool = Pool.NONE
    pool_window: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    n_weights: int = 0
    eps: float = 0.0

    @property
    def has_parameters(self) -> bool:
        """A conv with a bias, or a norm with an affine."""
        return bool(self.flags & 1)

    def encode(self) -> bytes:
        return _OP.pack(
            self.kind, self.act, self.flags, self.rice, self.a, self.b, self.channels, self.groups,
            *self.window, self.pool, *self.pool_window, 0, self.n_weights, self.eps,
        )  # fmt: skip

    @staticmethod
    def decode(record: bytes) -> Op:
        f = _OP.unpack(record)
        return Op(
            Kind(f[0]), f[4], f[5], Act(f[1]), f[2], f[3], f[6], f[7],
            f[8:14], Pool(f[14]), f[15:21], f[22], f[23],
        )  # fmt: skip


def unknown(part: str, given: object, where: str) -> ProgramError:
    """The error for code that meets a kind, an activation or a pool that it was not written for."""
    return ProgramError(f"{part} {given!r} is not known to {where}; compile a model without it, or add it there")


@dataclass(frozen=True)
class Layer:
    """What one op costs and makes, for people and for the meter."""

    name: str
    kind: Kind
    shape: tuple[int, int, int]
    """Channels, height and width of the tensor that it makes."""
    n_weights: int
    """Live weights."""
    n_dense: int
    """Weights that the layer would have unpruned."""
    n_values: int
    """Live weights, biases and norm parameters together."""
    macs: int
    """Multiply-accumulates of its live weights for one image."""
    dense_macs: int

    @property
    def density(self) -> float:
        return self.n_weights / self.n_dense if self.n_dense else 1.0


class Program(ProgramHead):
    """A program section, parsed. Make one with `assemble`, `Program(bytes)` or `load`."""

    def __init__(self, data: bytes, names: Sequence[str] = ()) -> None:
        super().__init__(data)
        c, n_ops = self.input_shape[0], self.n_ops
        ops_at = HEADER.size + 8 * c
        self._structure_at = ops_at + _OP.size * n_ops
        if len(data) != self._structure_at + self.n_structure:
            raise ProgramError(
                f"program truncated or padded: {len(data)} bytes, its header announces "
                f"{self._structure_at + self.n_structure}; get it again"
            )
        self.scale: tuple[float, ...] = struct.unpack_from(f"<{c}f", data, HEADER.size)
        self.shift: tuple[float, ...] = struct.unpack_from(f"<{c}f", data, HEADER.size + 4 * c)
        ops = []
        for i in range(n_ops):
            at = ops_at + _OP.size * i
            try:
                ops.append(Op.decode(data[at : at + _OP.size]))
            except ValueError as error:
                raise ProgramError(f"op {i} of the program is not one that this foreseed knows: {error}") from None
        self.ops: tuple[Op, ...] = tuple(ops)
        self._names = tuple(names) if len(names) == n_ops else ()

    @property
    def hash(self) -> bytes:
        """SHA-256 of the program section, which values do not change; messages have a shorter one (`foreseed.wire`)."""
        return hashlib.sha256(self.bytes).digest()

    def shapes(self) -> list[tuple[int, int, int]]:
        """The shape of every tensor: the image first, then the result of each op."""
        shapes = [self.input_shape]
        for i, op in enumerate(self.ops):
            if op.a > i or op.b > i:
                raise ProgramError(
                    f"op {i} reads tensor {max(op.a, op.b)}, which is made later; the program is damaged"
                )
            c, h, w = shapes[op.a]
            if op.kind is Kind.CONV:
                c, (h, w) = op.channels, _slide((h, w), op.window, i)
            if op.pool is not Pool.NONE:
                h, w = _slide((h, w), op.pool_window, i)
            shapes.append((c, h, w))
        return shapes

    def layers(self) -> list[Layer]:
        """Name, shape, live weights and MACs of every op."""
        shapes = self.shapes()
        rows = []
        for i, op in enumerate(self.ops):
            c, h, w = shapes[op.a]
            n_dense = macs = dense_macs = n_values = 0
            if op.kind is Kind.CONV:
                n_dense = op.channels * (c // max(op.groups, 1)) * op.window[0] * op.window[1]
                rows_, cols = _slide((h, w), op.window, i)
                macs, dense_macs = op.n_weights * rows_ * cols, n_dense * rows_ * cols
                n_values = op.n_weights + (op.channels if op.has_parameters else 0)
            elif op.kind is Kind.NORM and op.has_parameters:
                n_values = 2 * c
            name = self._names[i] if self._names else f"{op.kind.name.lower()}{i}"
            rows.append(Layer(name, op.kind, shapes[i + 1], op.n_weights, n_dense, n_values, macs, dense_macs))
        return rows

    @cached_property
    def macs(self) -> int:
        """Multiply-accumulates of live weights for one image's forward pass."""
        return sum(layer.macs for layer in self.layers())

    @cached_property
    def dense_macs(self) -> int:
        """The same, had nothing been pruned."""
        return sum(layer.dense_macs for layer in self.layers())

    def check_stats(self, stats: Sequence[float]) -> None:
        """Refuse statistics with a negative variance."""
        at = 0
        for i, op in enumerate(self.ops):
            if op.kind is Kind.NORM and not op.groups:
                channels = self.shapes()[op.a][0]
                lowest = min(stats[at + channels : at + 2 * channels])
                if lowest < 0:
                    raise ValuesError(
                        f"statistics of op {i}: a variance of {lowest}; expected 0 or more, get a good copy"
                    )
                at += 2 * channels

    def live(self) -> Iterator[tuple[int, range | array[int]]]:
        """The live weights of every conv: (op number, their indices in the layer's own numbering)."""
        shapes, at = self.shapes(), self._structure_at
        for i, op in enumerate(self.ops):
            if op.kind is not Kind.CONV:
                continue
            total = op.channels * (shapes[op.a][0] // max(op.groups, 1)) * op.window[0] * op.window[1]
            if op.rice == DENSE:
                yield i, range(total)
                continue
            indices, at = _rice_decode(self.bytes, at, op.rice, op.n_weights)
            if len(indices) and indices[-1] >= total:
                raise ProgramError(f"op {i}: live weight {indices[-1]} of a layer with {total}; the program is damaged")
            yield i, indices

    def save(
        self,
        path: str | os.PathLike[str],
        values: bytes | bytearray | memoryview | array[float],
        stats: bytes | bytearray | memoryview | array[float] = b"",
    ) -> None:
        """Write `model.fsp`; the file is there whole or not at all."""
        raw, raw_stats = _floats(values, self.n_live, "values"), _floats(stats, self.n_stats, "statistics")
        self.check_stats(array("f", raw_stats))
        meta = json.dumps({"layers": self._names}).encode() if self._names else b""
        body = b"".join(
            (
                _FILE_HEADER.pack(FILE_MAGIC, VERSION, 0, len(self.bytes), self.n_live, self.n_stats, len(meta)),
                self.bytes, raw, raw_stats, meta,
            )
        )  # fmt: skip
        write_whole(path, body + hashlib.sha256(body).digest())


@dataclass(frozen=True)
class Model:
    """A program with the values (and batch-norm statistics) that stood in its file."""

    program: Program
    values: array[float]
    stats: array[float]


def load(path: str | os.PathLike[str]) -> Model:
    """Read `model.fsp`, checking its hash, its sizes and that every number is finite."""
    data = Path(path).read_bytes()
    if len(data) < _FILE_HEADER.size + 32:
        raise ProgramError(f"{path}: truncated: {len(data)} bytes are no model file; get it again")
    magic, version, reserved, n_program, n_live, n_stats, n_meta = _FILE_HEADER.unpack_from(data)
    if magic != FILE_MAGIC:
        raise ProgramError(f"{path}: not a foreseed model: it starts with {magic!r}, expected {FILE_MAGIC!r}")
    if version > VERSION:
        raise ProgramError(
            f"{path}: version {version} is from the future: this foreseed reads up to {VERSION}; upgrade it"
        )
    expected = _FILE_HEADER.size + n_program + 4 * (n_live + n_stats) + n_meta + 32
    if version < 1 or reserved or len(data) != expected:
        raise ProgramError(
            f"{path}: truncated or padded: {len(data)} bytes, its header announces {expected}; get it again"
        )
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise ProgramError(f"{path}: damaged: its content does not have the hash it carries; get it again")
    at = _FILE_HEADER.size
    names = _names(path, data[at + n_program + 4 * (n_live + n_stats) : -32])
    program = Program(data[at : at + n_program], names)
    if (program.n_live, program.n_stats) != (n_live, n_stats):
        raise ProgramError(
            f"{path}: {n_live} values and {n_stats} statistics for a program of {program.n_live} and {program.n_stats}"
        )
    at += n_program
    values, stats = array("f", data[at : at + 4 * n_live]), array("f", data[at + 4 * n_live :][: 4 * n_stats])
    check_finite(values, f"{path}: values")
    check_finite(stats, f"{path}: statistics")
    program.check_stats(stats)
    return Model(program, values, stats)


def assemble(
    input_shape: tuple[int, int, int],
    classes: int,
    scale: Sequence[float],
    shift: Sequence[float],
    ops: Sequence[Op],
    live: Sequence[Sequence[int] | None],
    names: Sequence[str] = (),
) -> Program:
    """Put a program together; `live[i]` lists conv i's live weights in ascending order, None = all of them.

    `rice` and `n_weights` of the conv ops are chosen here: the smaller of dense and the best Rice code.
    """
    shapes = [input_shape]
    coded: list[Op] = []
    structure: list[bytes] = []
    n_live = n_stats = 0
    for i, (op, indices) in enumerate(zip(ops, live, strict=True)):
        c, h, w = shapes[op.a]
        if op.kind is Kind.CONV:
            total = op.channels * (c // max(op.groups, 1)) * op.window[0] * op.window[1]
            if indices is None or len(indices) == total:
                rice, n, code = DENSE, total, b""
            else:
                rice, code = _rice_best(indices)
                n = len(indices)
            op = Op(**{**op.__dict__, "rice": rice, "n_weights": n})
            structure.append(code)
            n_live += n + (op.channels if op.has_parameters else 0)
            c, (h, w) = op.channels, _slide((h, w), op.window, i)
        elif op.kind is Kind.NORM:
            n_live += 2 * c if op.has_parameters else 0
            n_stats += 0 if op.groups else 2 * c
        if op.pool is not Pool.NONE:
            h, w = _slide((h, w), op.pool_window, i)
        coded.append(op)
        shapes.append((c, h, w))
    code = b"".join(structure)
    c, h, w = input_shape
    header = HEADER.pack(PROGRAM_MAGIC, VERSION, len(coded), c, h, w, classes, n_live, n_stats, len(code), 0)
    floats = struct.pack(f"<{2 * c}f", *scale, *shift)
    return Program(header + floats + b"".join(op.encode() for op in coded) + code, names)


def check_finite(numbers: array[float], what: str) -> None:
    """Refuse NaN and infinity, naming the first."""
    # A sum is finite unless one of its terms is not, or the terms are absurdly large: both deserve a look.
    if not isfinite(sum(numbers)):
        for i, x in enumerate(numbers):
            if not isfinite(x):
                raise ValuesError(f"{what}: number {i} is {x}; expected finite numbers, get a good copy")


def _floats(numbers: Any, n: int, what: str) -> bytes:
    """The little-endian float32 bytes of a buffer of n finite numbers."""
    raw = memoryview(numbers).cast("B").tobytes()
    if len(raw) != 4 * n:
        raise ValuesError(f"{what}: {len(raw)} bytes given, expected {4 * n} ({n} float32 numbers)")
    check_finite(array("f", raw), what)
    return raw


def _names(path: str | os.PathLike[str], meta: bytes) -> tuple[str, ...]:
    if not meta:
        return ()
    try:
        return tuple(str(name) for name in json.loads(meta)["layers"])
    except (ValueError, KeyError, TypeError):
        raise ProgramError(f"{path}: its meta section is not the JSON it should be; get it again") from None


def _slide(size: tuple[int, int], window: tuple[int, ...], op: int) -> tuple[int, int]:
    """Output height and width of a kernel sliding over a map."""
    kh, kw, sh, sw, ph, pw = window
    if not (kh and kw and sh and sw) or size[0] + 2 * ph < kh or size[1] + 2 * pw < kw:
        raise ProgramError(
            f"op {op}: kernel {kh}x{kw}, stride {sh}x{sw}, padding {ph}x{pw} does not fit a map of {size[0]}x{size[1]}"
        )
    return (size[0] + 2 * ph - kh) // sh + 1, (size[1] + 2 * pw - kw) // sw + 1


def _rice_bits(gaps: Sequence[int], rice: int) -> int:
    return sum((gap >> rice) + 1 + rice for gap in gaps)


def _rice_best(indices: Sequence[int]) -> tuple[int, bytes]:
    """The cheapest Rice parameter for these indices, and their code."""
    gaps, previous = [], -1
    for index in indices:
        if index <= previous:
            raise ProgramError(f"live weights must ascend: {index} follows {previous}")
        gaps.append(int(index) - previous - 1)
        previous = int(index)
    rice = min(range(16), key=lambda r: _rice_bits(gaps, r))
    code = bytearray((_rice_bits(gaps, rice) + 7) // 8 + 3)
    at = 0
    for gap in gaps:
        at += gap >> rice
        word = (1 | (gap & ((1 << rice) - 1)) << 1) << (at & 7)  # at most 7 + 1 + 15 bits: three bytes
        for i in range(3):
            code[(at >> 3) + i] |= word >> (8 * i) & 0xFF
        at += 1 + rice
    return rice, bytes(code[: (at + 7) // 8])


def _rice_decode(data: bytes, at: int, rice: int, n: int) -> tuple[array[int], int]:
    """The indices of n Rice-coded gaps starting at byte `at`, and the byte after the code."""
    bit, index, indices = 8 * at, -1, array("I")
    end = 8 * len(data)
    for _ in range(n):
        zeros = bit
        while bit < end and not data[bit >> 3] >> (bit & 7) & 1:
            bit += 1
        gap = (bit - zeros) << rice
        bit += 1
        if bit + rice > end:
            raise ProgramError("the sparse structure is cut short; the program is damaged")
        for i in range(rice):
            gap |= (data[(bit + i) >> 3] >> ((bit + i) & 7) & 1) << i
        bit += rice
        index += gap + 1
        if index >> 32:
            raise ProgramError(f"the sparse structure names weight {index}; the program is damaged")
        indices.append(index)
    return indices, (bit + 7) // 8

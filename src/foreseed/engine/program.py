"""Programs: the immutable half of a pruned model, and the file that holds it (`docs/format.md`)."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod
from pathlib import Path
from typing import Any

from foreseed.engine.errors import ProgramError, ValuesError
from foreseed.engine.files import write_whole
from foreseed.engine.head import HEADER, PROGRAM_MAGIC, ProgramHead
from foreseed.engine.ops import DENSE, OP, Act, Kind, Op, Pool, Shape
from foreseed.engine.parts import KINDS
from foreseed.engine.walker import Layer, Place, walk

__all__ = [
    "DENSE", "FILE_MAGIC", "Act", "Kind", "Layer", "Model", "Op", "Pool", "Program", "assemble", "check_finite", "load",
]  # fmt: skip

FILE_MAGIC = b"\x89FSP\r\n\x1a\n"

_FILE_VERSION = 1
_FILE_HEADER = struct.Struct("<8sHHIIII")


class Program(ProgramHead):
    """A program section, parsed. Make one with `assemble`, `Program(bytes)` or `load`."""

    def __init__(self, data: bytes, names: Sequence[str] = ()) -> None:
        super().__init__(data)
        c, n_ops = self.input_shape[0], self.n_ops
        ops_at = HEADER.size + 8 * c
        self._structure_at = ops_at + OP.size * n_ops
        if len(data) != self._structure_at + self.n_structure:
            raise ProgramError(
                f"program truncated or padded: {len(data)} bytes, its header announces "
                f"{self._structure_at + self.n_structure}; get it again"
            )
        self.scale: tuple[float, ...] = struct.unpack_from(f"<{c}f", data, HEADER.size)
        self.shift: tuple[float, ...] = struct.unpack_from(f"<{c}f", data, HEADER.size + 4 * c)
        ops = []
        for i in range(n_ops):
            at = ops_at + OP.size * i
            try:
                ops.append(Op.decode(data[at : at + OP.size]))
            except ValueError as error:
                raise ProgramError(f"op {i} of the program is not one that this foreseed knows: {error}") from None
        self.ops: tuple[Op, ...] = tuple(ops)
        self.names = tuple(names) if len(names) == n_ops else ()

    def __reduce__(self) -> tuple[Any, ...]:
        # What is worked out from the bytes holds functions, which do not travel between processes.
        return Program, (self.bytes, self.names)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every op with what it reads, makes and holds."""
        return tuple(walk(self.ops, self.input_shape, self.names))

    def layers(self) -> list[Layer]:
        """Name, shape, live weights and MACs of every op."""
        return [place.layer for place in self.places]

    def tensor_sizes(self) -> list[int]:
        """How many of the values each tensor has, in their order: a layer's live weights, its biases, ..."""
        return [
            place.op.n_weights if name == "weight" and KINDS[place.op.kind].prunable else prod(shape)
            for place in self.places
            for name, shape in place.parameters.items()
        ]

    def shapes(self) -> list[Shape]:
        """The shape of every tensor: the image first, then the result of each op."""
        return [self.input_shape, *(layer.shape for layer in self.layers())]

    @cached_property
    def macs(self) -> int:
        """Multiply-accumulates of live weights for one image's forward pass."""
        return sum(layer.macs for layer in self.layers())

    def first_op(self, value: int) -> int:
        """The number of the op that a value belongs to: what comes before it does not depend on the value."""
        end = 0
        for place in self.places:
            end += place.layer.n_values
            if value < end:
                return place.number
        raise ValuesError(f"value {value} of a program that has {self.n_live}: expected one that is there")

    @cached_property
    def dense_macs(self) -> int:
        """The same, had nothing been pruned."""
        return sum(layer.dense_macs for layer in self.layers())

    def check_stats(self, stats: Sequence[float]) -> None:
        """Refuse statistics with a negative variance."""
        at = 0
        for place in self.places:
            for name, shape in place.statistics.items():
                lowest = min(stats[at : at + prod(shape)])
                if name == "running_var" and lowest < 0:
                    what = f"statistics of op {place.number}: a variance is negative, {lowest}"
                    raise ValuesError(f"{what}; expected 0 or more, get a good copy")
                at += prod(shape)

    def live(self) -> Iterator[tuple[int, range | array[int]]]:
        """The live weights of every op that may be pruned: (op number, their indices in the layer's own numbering)."""
        at = self._structure_at
        for i, (op, layer) in enumerate(zip(self.ops, self.layers(), strict=True)):
            if not KINDS[op.kind].prunable or op.owner is not None:
                continue
            total = layer.n_dense
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
        classes: Sequence[str] = (),
    ) -> None:
        """Write `model.fsp`, with the names of the classes if they are given; it is there whole or not at all."""
        raw, raw_stats = _floats(values, self.n_live, "values"), _floats(stats, self.n_stats, "statistics")
        self.check_stats(array("f", raw_stats))
        about = {key: names for key, names in (("layers", self.names), ("classes", tuple(classes))) if names}
        meta = json.dumps(about).encode() if about else b""
        body = b"".join(
            (
                _FILE_HEADER.pack(FILE_MAGIC, _FILE_VERSION, 0, len(self.bytes), self.n_live, self.n_stats, len(meta)),
                self.bytes, raw, raw_stats, meta,
            )
        )  # fmt: skip
        write_whole(path, body + hashlib.sha256(body).digest())


@dataclass(frozen=True)
class Model:
    """A program with the values, batch-norm statistics and names of classes that stood in its file."""

    program: Program
    values: array[float]
    stats: array[float]
    classes: tuple[str, ...]
    """"0", "1", ... where the file has no names for them."""


def load(path: str | os.PathLike[str]) -> Model:
    """Read `model.fsp`, checking its hash, its sizes and that every number is finite."""
    data = Path(path).read_bytes()
    if len(data) < _FILE_HEADER.size + 32:
        raise ProgramError(f"{path}: truncated: {len(data)} bytes are no model file; get it again")
    magic, version, reserved, n_program, n_live, n_stats, n_meta = _FILE_HEADER.unpack_from(data)
    if magic != FILE_MAGIC:
        raise ProgramError(f"{path}: not a foreseed model: it starts with {magic!r}, expected {FILE_MAGIC!r}")
    if version > _FILE_VERSION:
        raise ProgramError(
            f"{path}: version {version} is from the future: this foreseed reads up to {_FILE_VERSION}; upgrade it"
        )
    expected = _FILE_HEADER.size + n_program + 4 * (n_live + n_stats) + n_meta + 32
    if version < 1 or reserved or len(data) != expected:
        raise ProgramError(
            f"{path}: truncated or padded: {len(data)} bytes, its header announces {expected}; get it again"
        )
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise ProgramError(f"{path}: damaged: its content does not have the hash it carries; get it again")
    at = _FILE_HEADER.size
    layers, classes = _names(path, data[at + n_program + 4 * (n_live + n_stats) : -32])
    program = Program(data[at : at + n_program], layers)
    if (program.n_live, program.n_stats) != (n_live, n_stats):
        raise ProgramError(
            f"{path}: {n_live} values and {n_stats} statistics for a program of {program.n_live} and {program.n_stats}"
        )
    at += n_program
    values, stats = array("f", data[at : at + 4 * n_live]), array("f", data[at + 4 * n_live :][: 4 * n_stats])
    check_finite(values, f"{path}: values")
    check_finite(stats, f"{path}: statistics")
    program.check_stats(stats)
    if len(classes) not in (0, program.classes):
        raise ProgramError(f"{path}: {len(classes)} names for a program of {program.classes} classes; get it again")
    return Model(program, values, stats, classes or tuple(map(str, range(program.classes))))


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

    `rice` and `n_weights` of the conv ops are chosen here: the smaller of dense and the best Rice code. The program is
    of the oldest version that has all its ops, so that engines from before run it if they can.
    """
    coded: list[Op] = []
    structure: list[bytes] = []
    for place, indices in zip(walk(ops, input_shape), live, strict=True):
        op, total = place.op, place.layer.n_dense
        if op.owner is not None:
            op = replace(op, n_weights=coded[op.owner].n_weights)
        elif KINDS[op.kind].prunable:
            if indices is None or len(indices) == total:
                rice, n, code = DENSE, total, b""
            else:
                rice, code = _rice_best(indices)
                n = len(indices)
            op = replace(op, rice=rice, n_weights=n)
            structure.append(code)
        coded.append(op)
    places = list(walk(coded, input_shape))
    n_live, n_stats = sum(place.layer.n_values for place in places), sum(place.n_stats for place in places)
    code = b"".join(structure)
    c, h, w = input_shape
    version = max(op.version for op in coded)
    header = HEADER.pack(PROGRAM_MAGIC, version, len(coded), c, h, w, classes, n_live, n_stats, len(code), 0)
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


def _names(path: str | os.PathLike[str], meta: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of layers and of classes, as far as there are any."""
    try:
        about = dict(json.loads(meta)) if meta else {}
        layers, classes = (tuple(str(name) for name in about.get(key, ())) for key in ("layers", "classes"))
        return layers, classes
    except (ValueError, TypeError):
        raise ProgramError(f"{path}: its meta section is not the JSON it should be; get it again") from None


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

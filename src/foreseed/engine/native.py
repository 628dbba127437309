"""The C engine (`csrc/`) for Python. Standard library and cffi only: a device loads this module."""

from __future__ import annotations

import os
from _thread import allocate_lock
from array import array

from foreseed.engine._native import ffi, lib
from foreseed.engine.errors import BudgetError, ForeseedError, ProgramError, SamplesError, ValuesError
from foreseed.engine.head import ProgramHead
from foreseed.engine.types import (
    BLOCK,
    NOT_A_DIFFERENCE,
    Directions,
    Samples,
    check_compared,
    check_kept,
    check_quantiser,
    check_rebuilt,
    code_bytes,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from foreseed.engine.types import Buffer

_ISAS = {
    "best": lib.FS_BEST, "avx512": lib.FS_AVX512, "avx2": lib.FS_AVX2, "neon": lib.FS_NEON, "plain": lib.FS_PLAIN,
}  # fmt: skip
_KINDS = {"gaussian": lib.FS_GAUSSIAN, "rademacher": lib.FS_RADEMACHER}


def isas() -> list[str]:
    """The instruction sets that this machine runs, best first."""
    return [name for name in list(_ISAS)[1:] if lib.fs_isa_name(_ISAS[name]) != ffi.NULL]


# What the environment asks for, so that one machine can compute as another does; an engine refuses what is not there.
_ASKED = os.environ.get("FORESEED_ISA") or "best"
_CHOSEN = _ISAS[_ASKED] if _ASKED in isas() else lib.FS_BEST


def isa() -> str:
    """The instruction set in use: avx512, avx2, neon or plain."""
    if _ASKED not in ("best", *isas()):
        raise ForeseedError(f"FORESEED_ISA is {_ASKED!r}, expected one that this machine runs: {', '.join(isas())}")
    return str(ffi.string(lib.fs_isa_name(_CHOSEN)).decode())


class Planned:
    """What running a program takes, to the byte, known before it runs."""

    __slots__ = ("activations", "bookkeeping", "input", "perturbed", "program", "values")

    def __init__(
        self, program: int, values: int, perturbed: int, activations: int, input: int, bookkeeping: int
    ) -> None:
        self.program = program
        """Structure and ops; may lie in read-only memory."""
        self.values = values
        """The trainable numbers and the statistics."""
        self.perturbed = perturbed
        """The perturbed copy of the values (one per direction run side by side)."""
        self.activations = activations
        self.input = input
        """Float rows of the image being read and its bytes."""
        self.bookkeeping = bookkeeping

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Name and bytes of every part."""
        return {name: getattr(self, name) for name in self.__slots__}


class NativeEngine:
    """Runs a program forward in one fixed piece of memory.

    `batch` images are in memory at once and `directions` perturbed copies run side by side. With a
    `memory_budget` (bytes, everything included) the largest batch up to `batch` that fits is taken; if not
    even one image fits, weights are perturbed row by row as they are used, which needs no perturbed copy.
    `keep` are the values at which ranges of directions begin: what comes before is computed once for all directions of
    a range, and takes memory (before value 0 none); other ranges take whole passes. `lanes`, `by_row` and `isa` choose
    by hand what is otherwise chosen well. Results are the same bits (`isa="plain"` on x86, which has no fused
    multiply-add there, to rounding). $FORESEED_ISA is the default of `isa`.
    """

    def __init__(
        self,
        program: ProgramHead,
        batch: int = 32,
        directions: int = 1,
        memory_budget: int | None = None,
        *,
        lanes: int = 0,
        by_row: bool = False,
        isa: str = "best",
        keep: Sequence[int] = (),
    ) -> None:
        check_kept(keep, program.n_live)
        self.program, self.keep = program, tuple(keep)
        self._kept = ffi.new("uint32_t[]", self.keep)
        if isa not in _ISAS:
            raise ForeseedError(f"instruction set {isa!r}: expected one of {', '.join(_ISAS)}")
        self._isa = _ISAS[isa] or _CHOSEN
        self._bytes = ffi.from_buffer(program.bytes)
        self._program = ffi.new("fs_program *")
        self._open()
        config = (batch, lanes, directions, by_row)
        if memory_budget is not None:
            config = self._fit(batch, lanes, directions, memory_budget)
        self.batch, _, self.directions, self.by_row = config
        self.planned, arena, self.lanes = self._plan(config)
        self._memory = bytearray(arena + 63)
        start = ffi.cast("uintptr_t", ffi.from_buffer(self._memory))
        self._arena = ffi.from_buffer(self._memory)[-int(start) % 64 : arena + 63]
        handle = ffi.new("fs_engine **")
        _check(lib.fs_start(handle, self._program, self._config(config), self._arena, arena))
        self._engine = handle[0]
        # One call at a time: C works in this engine's arena with the GIL released.
        self._lock = allocate_lock()

    @property
    def planned_bytes(self) -> int:
        """All the memory that this engine needs, program and values included."""
        return self.planned.total

    @property
    def observed_bytes(self) -> int:
        """What of it has been touched so far."""
        fixed = self.planned.program + self.planned.values
        return fixed + int(lib.fs_high_water(self._engine)) + self._image_in_place(self.lanes)

    def loss(self, values: Buffer, samples: Samples, stats: Buffer | None = None) -> tuple[float, int]:
        """The sum of the samples' losses, and how many were classified rightly."""
        total, correct = ffi.new("double *"), ffi.new("uint32_t *")
        with self._lock, _Samples(self.program, samples) as s:
            status = lib.fs_loss(self._engine, self._values(values), self._stats(stats), s, total, correct)
        self._check(status, samples)
        return total[0], correct[0]

    def logits(self, values: Buffer, samples: Samples, stats: Buffer | None = None) -> array[float]:
        """The logits of every sample, row by row."""
        out = array("f", bytes(4 * samples.count * self.program.classes))
        with self._lock, _Samples(self.program, samples) as s:
            status = lib.fs_logits(self._engine, self._values(values), self._stats(stats), s, _out(out))
        self._check(status, samples)
        return out

    def batch_stats(self, values: Buffer, samples: Samples) -> array[float]:
        """The batch-norm layers' statistics over these samples: per layer the means, then the variances."""
        out = array("f", bytes(4 * self.program.n_stats))
        with self._lock, _Samples(self.program, samples) as s:
            status = lib.fs_batch_stats(self._engine, self._values(values), s, _out(out))
        self._check(status, samples)
        return out

    def probe(
        self, values: Buffer, samples: Samples, directions: Directions, stats: Buffer | None = None
    ) -> array[float]:
        """The sum of the samples' losses along each direction."""
        directions.perturbed(self.program.n_live)
        out = array("d", bytes(8 * directions.count))
        with self._lock, _Samples(self.program, samples) as s:
            status = lib.fs_probe(
                self._engine, self._values(values), self._stats(stats), s, _directions(directions),
                ffi.from_buffer("double[]", out), ffi.NULL,
            )  # fmt: skip
        self._check(status, samples)
        return out

    def differences(
        self,
        values: Buffer,
        samples: Samples,
        directions: Directions,
        spread: int = 1,
        central: bool = False,
        stats: Buffer | None = None,
        release: Callable[[int, int], None] | None = None,
    ) -> tuple[array[float], float]:
        """How the mean loss changes along each direction, on its part of the samples, and the mean loss itself.

        `release(first, count)` is told of samples that have been used up (see `foreseed.device.probing.answer`).
        """
        directions.perturbed(self.program.n_live)
        out, base = array("f", bytes(4 * directions.count)), ffi.new("double *")
        work = ffi.new("double[]", 3 * -(-directions.count // min(spread, max(samples.count, 1))))
        context = ffi.NULL if release is None else ffi.new_handle(release)
        done = ffi.NULL if release is None else lib.fs_done
        order = ffi.new("fs_order *", (_directions(directions)[0], spread, central, BLOCK, done, context))
        with self._lock, _Samples(self.program, samples) as s:
            status = lib.fs_answer(
                self._engine, self._values(values), self._stats(stats), s, order, work, _out(out), base
            )
        self._check(status, samples)
        return out, base[0]

    def _open(self) -> None:
        status = lib.fs_open(self._program, self._bytes, len(self.program.bytes))
        if status:
            raise ProgramError(
                f"{_PROGRAM_FAULTS.get(status, 'the program cannot be run')}"
                f"{f' (op {self._program.where})' if status in _FAULTS_OF_OPS else ''}"
                "; get the program again, or compile it anew"
            )

    def _plan(self, config: tuple[int, int, int, bool]) -> tuple[Planned, int, int]:
        plan = ffi.new("fs_plan *")
        _check(lib.fs_make_plan(self._program, self._config(config), plan))
        values = 4 * (self.program.n_live + self.program.n_stats)
        image = self._image_in_place(plan.lanes)
        return (
            Planned(
                len(self.program.bytes), values, plan.perturbed, plan.activations, plan.input + image, plan.bookkeeping
            ),
            plan.arena,
            plan.lanes,
        )

    def _config(self, config: tuple[int, int, int, bool]) -> Any:
        batch, lanes, directions, by_row = config
        if not (0 < batch < 1 << 32 and 0 < directions < 1 << 32 and 0 <= lanes <= 16):
            _check(lib.FS_BAD_CONFIG)
        given = batch, lanes, directions, by_row, self._isa, self._kept, len(self.keep)
        return ffi.new("fs_config *", given)

    def _image_in_place(self, lanes: int) -> int:
        # With several lanes the image's bytes are rearranged, and counted, in the arena.
        return self.program.image_bytes if lanes == 1 else 0

    def _fit(self, batch: int, lanes: int, directions: int, budget: int) -> tuple[int, int, int, bool]:
        # The need grows with the batch, so the largest that fits is found by halving the interval.
        low, high = 0, batch
        while low < high:
            middle = (low + high + 1) // 2
            if self._plan((middle, lanes, directions, False))[0].total <= budget:
                low = middle
            else:
                high = middle - 1
        if low:
            return low, lanes, directions, False
        smallest = (1, 1, 1, True)
        needed = self._plan(smallest)[0].total
        if needed > budget:
            raise BudgetError(
                f"the program needs at least {needed} bytes, the budget is {budget}; prune further or raise the budget",
                needed,
            )
        return smallest

    def _values(self, values: Buffer) -> Any:
        return _numbers(values, self.program.n_live, "values")

    def _stats(self, stats: Buffer | None) -> Any:
        return ffi.NULL if stats is None else _numbers(stats, self.program.n_stats, "statistics")

    def _check(self, status: int, samples: Samples) -> None:
        if status == lib.FS_BAD_LABEL:
            data = memoryview(samples.data).cast("B")
            labels = (data[samples.label_offset + i * samples.stride] for i in range(samples.count))
            at, label = next((i, x) for i, x in enumerate(labels) if x >= self.program.classes)
            raise SamplesError(
                f"sample {at} has label {label}, the program has {self.program.classes} classes (0 to "
                f"{self.program.classes - 1}); check the shard"
            )
        _check(status)


class Guard:
    """Watches over a mapped file: what of it can no longer be read is 0, and `lost` is true from then on."""

    __slots__ = ("_guard",)

    def __init__(self, mapped: Buffer) -> None:
        """From the beginning of a page; `close` it before the file is unmapped."""
        with ffi.from_buffer("uint8_t[]", mapped) as data:
            self._guard: Any = ffi.new("fs_guard *", {"start": data, "size": len(data)})
        lib.fs_guard_range(self._guard)

    @property
    def lost(self) -> bool:
        return bool(self._guard.lost)

    def close(self) -> None:
        lib.fs_unguard(self._guard)

    __del__ = close


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """One block of the generator behind the directions."""
    words = ffi.new("uint32_t[4]")
    lib.fs_philox(list(counter), seed, words)
    return words[0], words[1], words[2], words[3]


def direction(d: Directions, k: int, n: int, start: int = 0) -> array[float]:
    """Coordinates start to start + n of direction k."""
    out = array("f", bytes(4 * n))
    lib.fs_direction(_directions(d), k, start, n, _out(out))
    return out


def perturb(values: Buffer, d: Directions, k: int) -> array[float]:
    """A copy of the values, moved by sigma along direction k."""
    n = memoryview(values).nbytes // 4
    out = array("f", bytes(4 * n))
    lib.fs_perturb(_directions(d), k, 0, n, _floats(values), _out(out))
    return out


def accumulate(gradient: Buffer, d: Directions, coefficients: Buffer, start: int = 0) -> None:
    """Add every direction times its coefficient to (a range of) a gradient estimate, in place."""
    given = memoryview(coefficients).nbytes // 4
    if given != d.count:
        raise ValuesError(f"{given} coefficients for {d.count} directions: expected one each")
    n = memoryview(gradient).nbytes // 4
    lib.fs_accumulate(_directions(d), _floats(coefficients), start, n, _out(gradient))


def rebuild(
    gradient: Buffer, halves: Buffer, parts: Sequence[Directions], coefficients: Buffer, start: int, n: int
) -> None:
    """Add every part's directions (with a step of 1), times their coefficients, to a gradient of all values.

    Of the directions, which perturb the same values, n coordinates from `start` on. `halves`, two vectors a part, get
    in the same places what the first half of its directions and the others have added.
    """
    whole, given, room = (memoryview(numbers).nbytes // 4 for numbers in (gradient, coefficients, halves))
    at = check_rebuilt(parts, whole, given, room, (start, start + n)).start
    there = ffi.new("fs_directions[]", [_directions(part)[0] for part in parts])
    lib.fs_rebuild(there, len(parts), _floats(coefficients), start, n, _out(gradient) + at, _out(halves) + at, whole)


def compare(halves: Buffer, n: int, sums: Buffer, products: Buffer) -> None:
    """Of parts that are two halves of n numbers each: the sums of the first and of the last halves, in float64.

    `products` get two numbers a part: the part's product with itself, and with the sum of all parts.
    """
    numbers = _floats(halves)
    count = check_compared(len(numbers), n, memoryview(sums).nbytes // 8, memoryview(products).nbytes // 8)
    out = (ffi.from_buffer("double[]", room) for room in (sums, bytearray(16 * n), products))
    lib.fs_compare(numbers, count, n, *out)


def project(d: Directions, vector: Buffer) -> array[float]:
    """The inner product of every direction with a vector: directional derivatives, if it is a gradient."""
    out = array("d", bytes(8 * d.count))
    n = memoryview(vector).nbytes // 4
    lib.fs_project(_directions(d), _floats(vector), n, ffi.from_buffer("double[]", out))
    return out


def sgd(values: Buffer, momentum: Buffer | None, gradient: Buffer, lr: float, mu: float, decay: float) -> None:
    """One step of SGD with momentum and weight decay, in place."""
    n = _same_length(values, gradient, *([] if momentum is None else [momentum]))
    if momentum is None and mu:
        raise ValuesError(f"momentum {mu} without a momentum vector: give one, or set momentum to 0")
    velocity = ffi.NULL if momentum is None else _out(momentum)
    lib.fs_sgd(_out(values), velocity, _floats(gradient), n, lr, mu, decay, _CHOSEN)


def adam(
    values: Buffer,
    m: Buffer,
    v: Buffer,
    gradient: Buffer,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    k1: float,
    k2: float,
) -> None:
    """One step of Adam, in place; k1 and k2 are the bias corrections 1/(1 - beta^t)."""
    n = _same_length(values, m, v, gradient)
    lib.fs_adam(
        _out(values), _out(m), _out(v), _floats(gradient), n, lr, beta1, beta2, eps, decay, k1, k2, _CHOSEN
    )  # fmt: skip


def quantise(
    differences: Buffer, bits: int, seed: int, round: int, device: int, block: int = 0
) -> tuple[float, memoryview]:
    """Pack loss differences in place, in 1, 2, 4 or 8 bits each; returns their scale and the bytes of the codes.

    Each `block` of a round's values is rounded in its own way.
    """
    n = memoryview(differences).nbytes // 4
    check_quantiser(n, bits, block)
    numbers = _out(differences)
    if lib.fs_first_not_finite(numbers, n) < n:
        raise ValuesError(NOT_A_DIFFERENCE)
    scale = lib.fs_quantise(numbers, n, ffi.new("fs_quantiser *", (seed, round, device, bits, block)))
    return scale, memoryview(differences).cast("B")[: code_bytes(n, bits)]


@ffi.def_extern()  # type: ignore[untyped-decorator]
def fs_done(context: Any, first: int, count: int) -> None:
    """C has used samples up."""
    ffi.from_handle(context)(first, count)


_FAULTS_OF_OPS = (lib.FS_BAD_OP, lib.FS_BAD_STRUCTURE, lib.FS_LEFT_OUT)
_PROGRAM_FAULTS = {
    lib.FS_BAD_MAGIC: "not a program",
    lib.FS_BAD_VERSION: "the program is of a version from the future",
    lib.FS_BAD_SIZE: "the program is truncated or padded",
    lib.FS_BAD_HEADER: "the program's header contradicts its content",
    lib.FS_BAD_OP: "an op of the program breaks the rules of the format",
    lib.FS_BAD_STRUCTURE: "the sparse structure of an op is damaged",
    lib.FS_LEFT_OUT: "an op of the program needs a layer that this build of the engine leaves out",
}


def _check(status: int) -> None:
    if status == lib.FS_NO_SAMPLES:
        raise SamplesError("no samples given; expected at least one, check the shard")
    if status == lib.FS_NOT_FINITE:
        raise ValuesError("the loss is not finite: the values have grown too large; lower the learning rate or sigma")
    if status == lib.FS_BAD_STATS:
        raise ValuesError("statistics: a variance is negative; expected 0 or more, get a good copy")
    if status == lib.FS_BAD_CONFIG:
        raise ForeseedError(
            "batch and directions must be at least 1 (directions 1 with by_row), lanes 1, 2, 4, 8 or 16, the "
            "instruction set one of this machine, and all must fit memory"
        )
    if status:
        raise ForeseedError(f"the engine refused to start (status {status})")


def _floats(numbers: Buffer, writable: bool = False) -> Any:
    floats = ffi.from_buffer("float[]", numbers, require_writable=writable)
    if len(floats) and int(ffi.cast("uintptr_t", floats)) % 4:
        raise ValuesError(
            "numbers that do not start at a multiple of four bytes: give a buffer of whole float32 numbers"
        )
    return floats


def _out(numbers: Buffer) -> Any:
    """A buffer that C writes."""
    return _floats(numbers, writable=True)


def _numbers(numbers: Buffer, n: int, what: str) -> Any:
    """A buffer of exactly n finite float32 numbers, as C sees it."""
    given = memoryview(numbers).nbytes
    if given != 4 * n:
        raise ValuesError(f"{what}: {given} bytes given, expected {4 * n} ({n} float32 numbers of this program)")
    floats = _floats(numbers)
    at = lib.fs_first_not_finite(floats, n)
    if at < n:
        raise ValuesError(f"{what}: number {at} is {floats[at]}; expected finite numbers, get a good copy")
    return floats


def _same_length(first: Buffer, *others: Buffer) -> int:
    sizes = [memoryview(numbers).nbytes // 4 for numbers in (first, *others)]
    if len(set(sizes)) != 1:
        raise ValuesError(f"vectors of {sizes} numbers: expected the same length for all")
    return sizes[0]


def _directions(d: Directions) -> Any:
    return ffi.new(
        "fs_directions *",
        {
            "seed": d.seed, "round": d.round, "device": d.device, "first": d.first, "step": d.step,
            "count": d.count, "kind": _KINDS[d.kind], "sigma": d.sigma, "isa": _CHOSEN,
            "at": d.at, "size": d.size,
        },
    )  # fmt: skip


class _Samples:
    """The C view of samples, checked against their buffer, which is held while C reads it."""

    def __init__(self, program: ProgramHead, samples: Samples) -> None:
        s, size = samples, memoryview(samples.data).nbytes
        last = (s.count - 1) * s.stride
        if s.count < 1:
            _check(lib.FS_NO_SAMPLES)
        if min(s.stride, s.image_offset, s.label_offset) < 0 or (
            last + s.image_offset + program.image_bytes > size or last + s.label_offset >= size
        ):
            raise SamplesError(
                f"{s.count} samples of {program.image_bytes} bytes, {s.stride} bytes apart, reach beyond the "
                f"{size} bytes given; check the shard and the program's input shape {program.input_shape}"
            )
        self._data = ffi.from_buffer("uint8_t[]", samples.data)
        self._view = ffi.new(
            "fs_samples *", (self._data + s.image_offset, self._data + s.label_offset, s.stride, s.count)
        )

    def __enter__(self) -> Any:
        return self._view

    def __exit__(self, *_: object) -> None:
        ffi.release(self._data)

"""Where the engine's time goes: every layer of a case, and what is done beside the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter
from typing import Any

from foreseed.bench.cases import CASES, Case, make_case
from foreseed.bench.contenders import SIGMA
from foreseed.bench.machine import describe_machine
from foreseed.bench.measure import gemm, pinned
from foreseed.engine._native import ffi, lib
from foreseed.engine.errors import ForeseedError
from foreseed.engine.native import NativeEngine
from foreseed.engine.types import Directions

BESIDE = {
    "directions and perturbing": lib.FS_TIME_PERTURB,
    "reading images": lib.FS_TIME_IMAGES,
    "pooling inside convs": lib.FS_TIME_POOL,
    "loss": lib.FS_TIME_LOSS,
}
_FEWEST_ROUNDS = 3


def bench_layers(
    cases: Sequence[str],
    seconds: float = 10.0,
    images: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The milliseconds of a probe (one direction over the images of a case, one thread) by layer.

    Runs alternate with the machine's matrix product, and each row's shortest time counts: rows are then rather too
    short than too long where the machine is shared.
    """
    if not seconds > 0:
        raise ForeseedError(f"seconds {seconds}: expected a positive number, such as 10")
    rows = []
    for name in cases:
        progress(f"{name}, layers")
        rows.append(_measure(make_case(name, images or CASES[name].images), seconds))
    return {"machine": describe_machine(), "cases": rows}


def _measure(case: Case, seconds: float) -> dict[str, Any]:
    engine = NativeEngine(case.program, case.spec.batch, case.spec.directions)
    best = [float("inf")] * lib.FS_TIMES
    rate, start = 0.0, perf_counter()
    with pinned(1):
        product, product_gmacs = gemm(1)
        for number in count(1):
            best = [min(pair) for pair in zip(best, _times(engine, case, number), strict=True)]
            began = perf_counter()
            product.run(1)
            rate = max(rate, product_gmacs / (perf_counter() - began))
            if number >= _FEWEST_ROUNDS and perf_counter() - start > seconds:
                break
    layers = [
        _row(layer.name, best[i], layer.macs * case.samples.count) for i, layer in enumerate(case.program.layers())
    ]
    rows = layers + [_row(name, best[at], 0) for name, at in BESIDE.items()]
    total = sum(row["ms"] for row in rows)
    for row in rows:
        row["share_of_time"] = row["ms"] / total
        row["gemm_share"] = row["gmac_per_s"] / rate
    whole = _row(case.name, total, case.program.macs * case.samples.count)
    return {"case": case.name, "images": case.samples.count, "gemm_gmac_per_s": rate, "rows": rows} | {
        "ms": total, "gemm_share": whole["gmac_per_s"] / rate
    }  # fmt: skip


def _times(engine: NativeEngine, case: Case, number: int) -> list[float]:
    """Milliseconds of one probe, by op and then by what FS_TIME_... name."""
    times = ffi.new("uint64_t[]", lib.FS_TIMES)
    lib.fs_time(times)
    try:
        engine.probe(case.values, case.samples, Directions(1, number, 0, engine.directions, sigma=SIGMA))
    finally:
        lib.fs_time(ffi.NULL)
    return [nanoseconds / engine.directions / 1e6 for nanoseconds in times]


def _row(name: str, milliseconds: float, macs: int) -> dict[str, Any]:
    rate = macs / milliseconds / 1e6 if milliseconds else 0.0
    return {"layer": name, "ms": milliseconds, "macs": macs, "gmac_per_s": rate}

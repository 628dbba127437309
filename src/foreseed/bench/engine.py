"""How fast perturbed copies of a model are probed: the engine beside PyTorch and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from foreseed.bench.cases import CASES, Case, make_case
from foreseed.bench.code_size import cortex_m_code_bytes
from foreseed.bench.contenders import CONTENDERS, first_direction, foreseed
from foreseed.bench.machine import describe_machine
from foreseed.bench.measure import Setup, fastest, gemm, in_threads, interleaved, pinned
from foreseed.engine.errors import ForeseedError
from foreseed.engine.native import NativeEngine, perturb

# Sums of 500 float32 losses; a wrong layer or a forgotten perturbation is off by far more.
_TOLERANCE = 1e-4
_ALONE = "foreseed, one thread"
_GEMM = "gemm"
NOT_INSTALLED = "not installed"


class DisagreementError(ForeseedError):
    """Contenders that do not compute the same loss: their times cannot be compared."""


def bench_engine(
    cases: Sequence[str],
    seconds: float = 10.0,
    threads: Sequence[int] = (1, 2),
    images: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all contenders on these cases, `seconds` of timing for each case and number of threads.

    A probe is one direction over all images of a case (or over `images` of them). `gmac_per_s` counts live weights
    for foreseed and all weights for the others, which compute with the zeros too.
    """
    if not seconds > 0:
        raise ForeseedError(f"seconds {seconds}: expected a positive number, such as 10")
    rows, settings, speedups = [], {}, {}
    for name in cases:
        case = make_case(name, images or CASES[name].images)
        for n in threads:
            progress(f"{name}, {n} thread{'s' if n > 1 else ''}")
            row, chosen, gain = _measure(case, n, seconds)
            rows.append(row)
            settings[f"{name}/{n}"] = {"images": case.samples.count, **chosen}
            if n == 2:
                speedups[name] = gain
    return {
        "machine": describe_machine(),
        "cases": rows,
        "two_thread_speedup": speedups,
        "cortex_m_code_bytes": cortex_m_code_bytes(),
        "settings": settings,
    }


def _measure(case: Case, threads: int, seconds: float) -> tuple[dict[str, Any], dict[str, str], float]:
    """The row of a case, the settings that were best for each contender, and foreseed's gain over one thread."""
    with pinned(threads) as cores:
        offers = {name: make(case, cores) for name, make in CONTENDERS.items()}
        best = {name: fastest(_checked(case, name, ways)) for name, ways in offers.items() if ways is not None}
        product, product_gmacs = gemm(threads)
        rivals = {**best, _GEMM: product}
        chosen = {name: way.settings for name, way in rivals.items()}
        if threads > 1:  # in the same turns, since a machine's speed changes from minute to minute
            rivals[_ALONE] = in_threads(lambda: fastest(foreseed(case, cores[:1])), cores[:1])
        rates = interleaved(rivals, seconds)
    row = _row(case, threads, rates, list(CONTENDERS), rates[_GEMM] * product_gmacs)
    return row, chosen, rates["foreseed"] / rates.get(_ALONE, rates["foreseed"])


def _checked(case: Case, name: str, ways: Iterable[Setup]) -> Iterator[Setup]:
    """The ways of a contender, each after it has found foreseed's loss for the same perturbed weights."""
    direction = first_direction()
    weights = case.dense(perturb(case.values, direction, 0))
    (expected,) = NativeEngine(case.program).probe(case.values, case.samples, direction)
    for way in ways:
        loss = expected if way.loss is None else way.loss(weights)
        if not abs(loss - expected) <= _TOLERANCE * abs(expected):
            raise DisagreementError(
                f"{case.name}: {name} ({way.settings}) finds the loss {loss}, foreseed {expected}; "
                "expected the same, so their times are not compared: report this"
            )
        yield way


def _row(case: Case, threads: int, rates: Mapping[str, float], names: Sequence[str], limit: float) -> dict[str, Any]:
    contenders: dict[str, Any] = {}
    for name in names:
        macs = (case.program.macs if name == "foreseed" else case.program.dense_macs) * case.samples.count
        measured = {"probes_per_s": rates[name], "gmac_per_s": rates[name] * macs / 1e9} if name in rates else None
        contenders[name] = measured or NOT_INSTALLED
    return {
        "case": case.name,
        "threads": threads,
        "contenders": contenders,
        "ratio": {name: rates["foreseed"] / rates[name] if name in rates else None for name in names[1:]},
        "gemm_gmac_per_s": limit,
        "gemm_share": contenders["foreseed"]["gmac_per_s"] / limit,
    }

"""How much memory a device needs: planned, observed, and of a real process, beside one that backpropagates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from foreseed.bench.cases import IMAGES, Case, make_case
from foreseed.bench.machine import describe_machine
from foreseed.bench.measure import allowed_cores
from foreseed.engine.errors import ForeseedError
from foreseed.engine.native import NativeEngine
from foreseed.engine.types import Directions
from foreseed.meter import bare_peak_bytes, device_peak_bytes, process_peak_bytes

_CASES = {"lenet5-dense": 1.0, "lenet5-90": 0.1, "resnet20-dense": 1.0, "resnet20-90": 0.1}


def bench_memory(
    cases: Sequence[str] = tuple(_CASES),
    k: int = 50,
    spread: int = 10,
    images: int = IMAGES,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure what these cases need; MB are 10^6 bytes.

    Planned and observed bytes are those of the engine, program and values included. The device process answers one
    order of `k` directions over `images` images with batch 1.
    """
    bare = bare_peak_bytes()
    if bare is None:
        raise ForeseedError("this system does not tell the peak memory of a process (/proc/self/status); use Linux")
    # What a process holds does not depend on its speed, so cores are shared.
    with ThreadPoolExecutor(len(allowed_cores())) as pool:
        made = [make_case(name, images) for name in cases]
        devices = [
            pool.submit(device_peak_bytes, case.program, case.values, case.samples.data, k, spread) for case in made
        ]
        trainers = [pool.submit(process_peak_bytes, "bp", case.program, 32) for case in made]
        rows = []
        for case, device, trainer in zip(made, devices, trainers, strict=True):
            progress(f"{case.name}: a device process, a PyTorch process")
            peaks = {"process_peak_mb": _mb(device.result()), "torch_bp_process_peak_mb": _mb(trainer.result())}
            rows.append({"model": case.spec.model, "density": _CASES[case.name], **_engine_bytes(case), **peaks})
    return {
        "models": rows,
        "bare_interpreter_mb": _mb(bare),
        "order": {"k": k, "spread": spread, "images": images},
        "machine": describe_machine(),
    }


def _engine_bytes(case: Case) -> dict[str, Any]:
    engines = {f"batch_{batch}": NativeEngine(case.program, batch) for batch in (1, 32)}
    few = case.samples.part(0, min(32, case.samples.count))
    for engine in engines.values():
        engine.probe(case.values, few, Directions(seed=1, round=1, device=1, count=1))
    planned: dict[str, Any] = {name: engine.planned_bytes for name, engine in engines.items()}
    planned["smallest"] = NativeEngine(case.program, 1, by_row=True).planned_bytes
    planned["parts"] = engines["batch_1"].planned.parts()
    return {
        "planned_bytes": planned,
        "observed_bytes": {name: engine.observed_bytes for name, engine in engines.items()},
    }


def _mb(peak: int | None) -> float:
    assert peak is not None  # the system told that of a bare interpreter
    return peak / 1e6

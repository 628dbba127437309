"""How much memory a device needs: planned, observed, and of a real process, beside one that backpropagates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import foreseed
from foreseed.bench import device_process  # imported here too, so that its byte code is there when it is measured
from foreseed.bench.cases import IMAGES, Case, make_case
from foreseed.bench.machine import describe_machine
from foreseed.bench.measure import allowed_cores
from foreseed.engine.errors import ForeseedError
from foreseed.engine.native import NativeEngine
from foreseed.engine.types import Directions

_CASES = {"lenet5-dense": 1.0, "lenet5-90": 0.1, "resnet20-dense": 1.0, "resnet20-90": 0.1}


class ProcessError(ForeseedError):
    """A measured process that failed."""


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
    if not Path("/proc/self/status").exists():
        raise ForeseedError("this system does not tell the peak memory of a process (/proc/self/status); use Linux")
    # What a process holds does not depend on its speed, so cores are shared.
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(allowed_cores())) as pool:
        made = [make_case(name, images) for name in cases]
        devices = [pool.submit(_device_peak, case, Path(folder), k, spread) for case in made]
        trainers = [pool.submit(_torch_peak, case.name) for case in made]
        rows = []
        for case, device, trainer in zip(made, devices, trainers, strict=True):
            progress(f"{case.name}: a device process, a PyTorch process")
            peaks = {"process_peak_mb": device.result() / 1e6, "torch_bp_process_peak_mb": trainer.result() / 1e6}
            rows.append({"model": case.spec.model, "density": _CASES[case.name], **_engine_bytes(case), **peaks})
    return {
        "models": rows,
        "bare_interpreter_mb": _bare_peak() / 1e6,
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


def _device_peak(case: Case, folder: Path, k: int, spread: int) -> int:
    files = {"program": case.program.bytes, "values": case.values, "shard": case.samples.data}
    for name, content in files.items():
        Path(folder, f"{case.name}.{name}").write_bytes(content)
    arguments = [str(Path(folder, f"{case.name}.{name}")) for name in files]
    return _peak([*_lean(device_process.__name__), *arguments, str(k), str(spread)])


def _bare_peak() -> int:
    status = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "print(open('/proc/self/status').read())"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _torch_peak(case: str) -> int:
    return _peak([sys.executable, "-c", _call("foreseed.bench.torch_process", sys.path), case])


def _lean(module: str) -> list[str]:
    """An interpreter without site packages, that imports nothing but what the module needs."""
    folders = [str(Path(foreseed.__file__).parents[1])]
    backend = find_spec("_cffi_backend")  # what loads the engine
    if backend is not None and backend.origin is not None:
        folders.append(str(Path(backend.origin).parent))
    return [sys.executable, "-I", "-S", "-c", _call(module, folders)]


def _call(module: str, folders: Sequence[str]) -> str:
    return f"import sys; sys.path[:0] = {list(folders)!r}; from {module} import main; main()"


def _peak(command: Sequence[str]) -> int:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ProcessError(f"a process whose memory was to be measured failed: {reason[-1]}; report this")
    return int(done.stdout)

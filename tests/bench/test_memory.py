"""`foreseed bench memory`: real processes, small settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foreseed.bench.memory import bench_memory
from foreseed.meter import MeterError, process


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bench_memory(["lenet5-90"], k=4, spread=2, images=16)


def test_result_is_json_with_the_documented_keys(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {"models", "bare_interpreter_mb", "order", "machine"}
    (row,) = result["models"]
    assert set(row) == {
        "model", "density", "planned_bytes", "observed_bytes", "process_peak_mb", "torch_bp_process_peak_mb"
    }  # fmt: skip
    assert (row["model"], row["density"]) == ("lenet5", 0.1)
    assert set(row["planned_bytes"]) == {"batch_1", "batch_32", "smallest", "parts"}
    assert set(row["observed_bytes"]) == {"batch_1", "batch_32"}


def test_parts_add_up_and_nothing_unplanned_is_observed(result: dict[str, Any]) -> None:
    planned, observed = result["models"][0]["planned_bytes"], result["models"][0]["observed_bytes"]
    assert set(planned["parts"]) == {"program", "values", "perturbed", "activations", "input", "bookkeeping"}
    assert sum(planned["parts"].values()) == planned["batch_1"]
    assert planned["smallest"] < planned["batch_1"] < planned["batch_32"]
    assert 0 < observed["batch_1"] <= planned["batch_1"]
    assert 0 < observed["batch_32"] <= planned["batch_32"]


def test_a_device_process_is_little_more_than_its_interpreter(result: dict[str, Any]) -> None:
    row = result["models"][0]
    assert result["bare_interpreter_mb"] < row["process_peak_mb"] < result["bare_interpreter_mb"] + 6
    assert row["torch_bp_process_peak_mb"] > 5 * row["process_peak_mb"]


def test_a_device_process_that_loads_numpy_or_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = process._run
    monkeypatch.setattr(
        process, "_run", lambda code, *rest: run("import sys; sys.modules['numpy'] = sys\n" + code, *rest)
    )
    with pytest.raises(MeterError, match="a device process imported numpy, which it must not"):
        bench_memory(["lenet5-90"], k=1, spread=1, images=2)

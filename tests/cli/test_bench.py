"""`foreseed bench` prints what the benchmarks give, for machines and for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreseed.bench import code_size, engine, estimate, liars, memory, prune, pruners, signs
from foreseed.cli import bench, main

ENGINE_RESULT = {
    "machine": {},
    "cases": [
        {
            "case": "lenet5-90",
            "threads": 1,
            "contenders": {
                "foreseed": {"probes_per_s": 180.0, "gmac_per_s": 39.0},
                "torch_loop": {"probes_per_s": 30.0, "gmac_per_s": 9.8},
                "torch_vmap": {"probes_per_s": 18.0, "gmac_per_s": 5.9},
                "onnxruntime": "not installed",
            },
            "ratio": {"torch_loop": 6.0, "torch_vmap": 10.0, "onnxruntime": None},
            "gemm_gmac_per_s": 60.0,
            "gemm_share": 0.65,
        }
    ],
    "two_thread_speedup": {"lenet5-90": 1.98},
    "cortex_m_code_bytes": 18_549,
    "settings": {"lenet5-90/1": {"images": 500, "foreseed": "batch 64"}},
}
MEMORY_RESULT = {
    "models": [
        {
            "model": "lenet5",
            "density": 0.1,
            "planned_bytes": {"batch_1": 68_653, "batch_32": 534_125, "smallest": 43_437, "parts": {"values": 25_700}},
            "observed_bytes": {"batch_1": 68_557, "batch_32": 534_061},
            "process_peak_mb": 11.3,
            "torch_bp_process_peak_mb": 356.5,
        }
    ],
    "bare_interpreter_mb": 8.6,
    "order": {"k": 50, "spread": 10, "images": 500},
    "machine": {},
}
SIGNS_RESULT = {
    "rows": [
        {"model": "lenet5", "sigma": sigma, "agree": share}
        for sigma, share in [(1e-3, 0.987), (1e-5, 0.5)]
    ],
    "difference": "forward", "directions": 640, "images": 16, "density": 0.1, "machine": {},
}  # fmt: skip
NET = {"density": 0.1, "pruner": "ntk-rand", "steps": 10}
ESTIMATE_RESULT = {
    "rows": [
        {
            "sweep": sweep, "series": series, "net": NET, "n_live": 6413, "k": 100, "spread": spread, "bits": bits,
            "kind": "gaussian", "error": 64.5, "error_se": 1.2, "error_law": 64.1, "cosine": 0.125, "cosine_se": 0.003,
            "cosine_law": 0.1239, "progress": 0.0217, "progress_se": 0.001, "progress_law": 0.0215,
        }
        for sweep, series, spread, bits in [
            ("k", "density 0.1, one bit", 1, 1), ("spread", "K fixed", 4, 32), ("bits", "K fixed", 1, 8),
            ("density", "dense", 1, 32),
        ]
    ],
    "gradients": [{**NET, "n_live": 6413, "images": 179, "gradient_square": 1.41, "rho": 0.466}],
    "draws": 8, "machine": {},
}  # fmt: skip

PRUNE_RESULT = {
    "models": [
        {
            "model": "lenet5-relu",
            "density": 0.3,
            "seconds": {"live weights": 0.5, "torch": 1.25},
            "ratio": {"torch": 2.5},
        }
    ],
    "threads": 2,
    "settings": {"redraws": 5, "batch": 100},
    "machine": {},
}

PRUNERS_RESULT = {
    "rows": [
        {"density": 0.01, "pruner": "synflow", "accuracies": [0.96, 0.94], "mean": 0.95, "std": 0.0141},
        {"density": 0.01, "pruner": "magnitude", "accuracies": [0.1], "mean": 0.1, "std": None},
    ],
    "seeds": [0, 1], "epochs": 12, "machine": {},
}  # fmt: skip

LIARS_RESULT = {
    "honest": [0.9, 0.92],
    "rows": [
        {"lie": lie, "tenths": tenths, "seed": seed, "accuracy": accuracy, "lost": lost, "refused": refused}
        for lie, tenths, accuracy, lost, refused in [
            ("huge", 1, 0.89, 0.02, {"differences": 7}), ("huge", 2, None, None, {"differences": 9}),
            ("sign-flipped", 1, 0.85, 0.06, {}), ("sign-flipped", 2, 0.8, 0.11, {}),
        ]
        for seed in (0, 1)
    ],
    "rounds": 60, "seeds": [0, 1], "robust": "clip", "bits": 32, "machine": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def canned(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench_engine(*_: Any, progress: Any, **__: Any) -> dict[str, Any]:
        progress("lenet5-90, 1 thread")
        return ENGINE_RESULT

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(engine, "bench_engine", bench_engine)
    monkeypatch.setattr(memory, "bench_memory", lambda **_: MEMORY_RESULT)
    monkeypatch.setattr(signs, "bench_signs", lambda *_, **__: SIGNS_RESULT)
    monkeypatch.setattr(prune, "bench_prune", lambda *_, **__: PRUNE_RESULT)
    monkeypatch.setattr(pruners, "bench_pruners", lambda *_, **__: PRUNERS_RESULT)
    monkeypatch.setattr(liars, "bench_liars", lambda *_, **__: LIARS_RESULT)
    monkeypatch.setattr(estimate, "bench_estimate", lambda *_, **__: ESTIMATE_RESULT)


def test_engine_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--cases", "lenet5-90", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == ENGINE_RESULT
    assert captured.err == "lenet5-90, 1 thread\n"


def test_engine_table_shows_rates_ratios_and_code_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--cases", "lenet5-90"]) == 0
    out = capsys.readouterr().out
    for said in ("180", "(39.0)", "1/6.0", "not installed", "0.65", "1 thread", "1.98 times", "18,549 bytes"):
        assert said in out
    assert max(len(line) for line in out.splitlines() if line.startswith("│")) <= 80


def test_memory_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == MEMORY_RESULT


def test_memory_table_shows_bytes_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory"]) == 0
    out = capsys.readouterr().out
    for said in ("density 0.1", "68,653", "25,700", "43,437", "11.3", "356.5", "8.6 MB", "10^6 bytes"):
        assert said in out


def test_signs_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "signs"]) == 0
    out = capsys.readouterr().out
    for said in ("forward", "0.001", "1e-05", "98.7 %", "50.0 %", "640 directions", "parts of 16 images"):
        assert said in out
    assert main(["bench", "signs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SIGNS_RESULT


def test_liars_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "liars"]) == 0
    out = capsys.readouterr().out
    for said in ("91.0", "89.0 (2.0)", "broke down", "differences", "80.0 (11.0)", "robust clip", "60 rounds"):
        assert said in out
    assert main(["bench", "liars", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == LIARS_RESULT
    assert main(["bench", "liars", "--seeds", "x"]) != 0
    assert "expected whole numbers" in capsys.readouterr().err


def test_prune_prints_seconds_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prune", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == PRUNE_RESULT
    assert main(["bench", "prune", "--models", "lenet5-relu"]) == 0
    out = capsys.readouterr().out
    for said in ("lenet5-relu", "0.3 ", "0.50", "1.25 (2.50)", "100 inputs: 5; threads: 2."):
        assert said in out
    assert main(["bench", "prune", "--densities", "2"]) != 0
    assert "expected shares above 0 and at most 1" in capsys.readouterr().err


def test_pruners_prints_accuracies_and_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pruners", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == PRUNERS_RESULT
    assert main(["bench", "pruners", "--densities", "0.01"]) == 0
    out = capsys.readouterr().out
    for said in ("synflow", "95.0 % ± 1.4", "96.0, 94.0", "10.0 %", "12 epochs", "seeds 0, 1"):
        assert said in out
    assert main(["bench", "pruners", "--densities", "2"]) == 2
    assert "expected shares above 0" in capsys.readouterr().err
    assert main(["bench", "pruners", "--pruners", "snap"]) == 2
    assert "no 'snap'" in capsys.readouterr().err


def test_code_says_what_each_layer_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {(): 22_000, ("gelu",): 21_736, ("cat",): 21_850}
    monkeypatch.setattr(code_size, "layer_names", lambda: ["gelu", "cat"])
    monkeypatch.setattr(code_size, "cortex_m_code_bytes", lambda without=(): sizes.get(tuple(without), 20_000))
    assert main(["bench", "code"]) == 0
    out = capsys.readouterr().out
    for said in ("gelu", "264", "150", "all norms", "2,000", "22,000 bytes with all layers, 20,000 with", "FS_WITHOUT"):
        assert said in out
    assert main(["bench", "code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["saved"]["cat"] == 150
    monkeypatch.setattr(code_size, "cortex_m_code_bytes", lambda without=(): None)
    assert main(["bench", "code"]) == 2
    assert "gcc-arm-none-eabi" in capsys.readouterr().err


def test_estimate_table_json_and_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "estimate"]) == 0
    out = capsys.readouterr().out
    for said in (
        "64.5 ± 1.2",
        "64.1",
        "0.1250 ± 0.0030",
        "0.1239",
        "6,413",
        "4 of 4 errors",
        "Mean of 8 rounds",
        "rho 0.466",
    ):
        assert said in out
    assert main(["bench", "estimate", "--json", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == ESTIMATE_RESULT
    assert {path.name for path in tmp_path.iterdir()} == {"estimate.svg", "estimate.png", "estimate.csv"}


def test_without_the_c_engine_there_is_nothing_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "instruction_set", lambda: None)
    assert main(["bench", "engine"]) == 2
    assert capsys.readouterr().err.startswith("foreseed: the C engine is not built")

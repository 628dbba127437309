"""`foreseed bench engine`: what it gives, with settings too small to mean anything."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from foreseed.bench import contenders
from foreseed.bench.cases import make_case
from foreseed.bench.code_size import cortex_m_code_bytes
from foreseed.bench.contenders import CONTENDERS, first_direction
from foreseed.bench.engine import DisagreementError, bench_engine
from foreseed.bench.measure import Setup, parse_threads
from foreseed.engine import ForeseedError, perturb

THREADS = parse_threads(None)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bench_engine(["lenet5-90"], seconds=0.01, threads=THREADS, images=8)


def test_result_is_json_with_the_documented_keys(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {"machine", "cases", "two_thread_speedup", "cortex_m_code_bytes", "settings"}
    assert [(row["case"], row["threads"]) for row in result["cases"]] == [("lenet5-90", n) for n in THREADS]
    for row in result["cases"]:
        assert set(row) == {"case", "threads", "contenders", "ratio", "gemm_gmac_per_s", "gemm_share"}
        assert list(row["contenders"]) == ["foreseed", "torch_loop", "torch_vmap", "onnxruntime"]
        assert all(set(c) == {"probes_per_s", "gmac_per_s"} for c in row["contenders"].values())
        assert list(row["ratio"]) == ["torch_loop", "torch_vmap", "onnxruntime"]
    assert list(result["two_thread_speedup"]) == (["lenet5-90"] if 2 in THREADS else [])


def test_numbers_hang_together(result: dict[str, Any]) -> None:
    row = result["cases"][0]
    mine, loop = row["contenders"]["foreseed"], row["contenders"]["torch_loop"]
    assert row["ratio"]["torch_loop"] == pytest.approx(mine["probes_per_s"] / loop["probes_per_s"])
    assert row["gemm_share"] == pytest.approx(mine["gmac_per_s"] / row["gemm_gmac_per_s"])
    assert mine["gmac_per_s"] / mine["probes_per_s"] == pytest.approx(8 * 434_814 / 1e9)
    assert loop["gmac_per_s"] / loop["probes_per_s"] == pytest.approx(8 * 651_720 / 1e9)


def test_every_contender_agrees_on_a_residual_net() -> None:
    case = make_case("resnet20-90", images=4)
    weights = case.dense(perturb(case.values, first_direction(), 0))
    ways = [next(make(case, [0]) or iter(())) for make in CONTENDERS.values()]
    losses = [way.loss(weights) for way in ways if way.loss]
    assert losses == pytest.approx([losses[0]] * len(CONTENDERS), rel=1e-4)


def test_a_contender_that_is_not_installed_is_listed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "find_spec", lambda _: None)
    monkeypatch.setitem(CONTENDERS, "torch_vmap", CONTENDERS["torch_loop"])  # quicker, and not what this is about
    row = bench_engine(["lenet5-90"], seconds=0.01, threads=[1], images=4)["cases"][0]
    assert row["contenders"]["onnxruntime"] == "not installed"
    assert row["ratio"]["onnxruntime"] is None


def test_contenders_that_disagree_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Setup("a wrong layer", lambda _: None, loss=lambda _: 1.0)
    monkeypatch.setitem(CONTENDERS, "torch_loop", lambda _case, _cores: iter([wrong]))
    with pytest.raises(DisagreementError, match=r"torch_loop \(a wrong layer\) finds the loss 1.0, foreseed"):
        bench_engine(["lenet5-90"], seconds=0.01, threads=[1], images=4)


def test_seconds_must_be_positive() -> None:
    with pytest.raises(ForeseedError, match="seconds 0: expected a positive number"):
        bench_engine(["lenet5-90"], seconds=0)


def test_code_size_is_known_where_the_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    size = cortex_m_code_bytes()
    assert (size is None) == (shutil.which("arm-none-eabi-gcc") is None)
    assert size is None or 16_000 < size <= 26 * 1024
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert cortex_m_code_bytes() is None

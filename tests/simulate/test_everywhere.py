"""A run by real finite differences is the same bits on every instruction set, with any of torch's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreseed.engine import native
from tests.prune.test_everywhere import kernels

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "rounds=3", "eval_every=1", "data.devices=8", "data.per_round=4", "prune.iterations=2", "prune.redraws=2",
    "prune.batch=10", "train.k=10", "train.spread=2",
]  # fmt: skip
# Without fused multiply-adds x86 agrees to rounding only (docs/protocol.md).
FUSED = [name for name in native.isas() if name != "plain"] or ["plain"]


def run_as(folder: Path, isa: str, chosen: str) -> bytes:
    """All that a run in a process of its own comes to, round by round."""
    words = ["run", "demo", *SETTINGS, "--out", str(folder), "--quiet"]
    environment = os.environ | {"FORESEED_ISA": isa, "ATEN_CPU_CAPABILITY": chosen}
    command = [sys.executable, "-m", "foreseed.cli", *words]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    without_clock = [row.partition('"seconds"')[0] + row.partition('"accuracy"')[2] for row in rows]
    return "\n".join(without_clock).encode() + (folder / "model.fsp").read_bytes()


@pytest.mark.slow
def test_a_run_is_the_same_bits_on_every_instruction_set_and_with_any_kernels(tmp_path: Path) -> None:
    ways = [(FUSED[0], chosen) for chosen in kernels()] + [(isa, kernels()[0]) for isa in FUSED[1:]]
    outcomes = {way: run_as(tmp_path / "-".join(way), *way) for way in ways}
    assert len(outcomes) > 1
    assert len(set(outcomes.values())) == 1


def test_an_instruction_set_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foreseed.cli", "run", "rounds=1", "--out", str(tmp_path / "run")]
    environment = os.environ | {"FORESEED_ISA": "sse9"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    expected = f"FORESEED_ISA is 'sse9', expected one that this machine runs: {', '.join(native.isas())}"
    assert done.stderr.splitlines() == [f"foreseed: {expected}"]
    assert not (tmp_path / "run").exists()

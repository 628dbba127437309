"""`foreseed bench instructions`: counts of a real emulator, few images."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from foreseed.engine._native import lib

from foreseed.bench import instructions
from foreseed.bench.instructions import bench_instructions
from foreseed.engine import ForeseedError


@pytest.mark.slow
def test_neon_takes_a_third_of_the_instructions_of_plain_loops_and_a_microcontroller_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm64 = replace(instructions._ARM64, images=4, batch=4)
    small = replace(instructions._SMALL, images=1)
    ways = {"plain": (arm64, lib.FS_PLAIN), "neon": (arm64, lib.FS_NEON), "microcontroller": (small, lib.FS_PLAIN)}
    monkeypatch.setattr(instructions, "_WAYS", ways)
    (row,) = bench_instructions(["lenet5-90"])["cases"]
    assert row["ratio"] == row["instructions"]["plain"] / row["instructions"]["neon"]
    assert row["ratio"] > 3
    assert 1 / 4 < row["per_mac"]["neon"] < 1 < row["per_mac"]["plain"] < row["per_mac"]["microcontroller"]


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "qemu-aarch64" else tool)
    with pytest.raises(ForeseedError, match="no qemu-aarch64 on PATH: install the Debian packages qemu-user"):
        bench_instructions(["lenet5-90"])

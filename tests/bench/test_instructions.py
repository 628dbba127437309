"""`foreseed bench instructions`: counts of a real emulator, few images."""

from __future__ import annotations

import shutil

import pytest

from foreseed.bench import instructions
from foreseed.bench.instructions import bench_instructions
from foreseed.engine import ForeseedError


@pytest.mark.slow
def test_neon_takes_a_third_of_the_instructions_of_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "_IMAGES", 4)
    monkeypatch.setattr(instructions, "_BATCH", 4)
    (row,) = bench_instructions(["lenet5-90"])["cases"]
    assert row["ratio"] == row["instructions"]["plain"] / row["instructions"]["neon"]
    assert row["ratio"] > 3
    assert 1 / 4 < row["per_mac"]["neon"] < 1 < row["per_mac"]["plain"]


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "qemu-aarch64" else tool)
    with pytest.raises(ForeseedError, match="no qemu-aarch64 on PATH: install the Debian packages qemu-user"):
        bench_instructions(["lenet5-90"])

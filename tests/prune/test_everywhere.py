"""A mask is the same bits whatever kernels torch runs, with any number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@cache
def kernels() -> list[str]:
    """What torch can be made to run on this machine, whatever it was made to run here."""
    free = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    command = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    best = subprocess.run(command, env=free, capture_output=True, text=True, check=True).stdout.strip().lower()
    every = ["default", "avx2", "avx512"]
    return every[: 1 + every.index(best)]


def in_a_process(chosen: str, threads: int, onednn: bool) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.prune.everywhere", "2", str(threads), str(int(onednn))]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": chosen}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_masks_do_not_depend_on_kernels_or_threads() -> None:
    found = {
        (chosen, threads, onednn): in_a_process(chosen, threads, onednn)
        for i, chosen in enumerate(kernels())
        # Every set of kernels with one thread and with two, with oneDNN and without.
        for threads, onednn in ([(1, True), (2, False)] if i % 2 else [(2, True), (1, False)])
    }
    assert {result["kernels"].lower() for result in found.values()} == set(kernels()), "torch was not made to change"
    first, *others = (result["masks"] for result in found.values())
    looks = [digest for name, digest in first.items() if any(word in name for word in ("ntk", "snip", "grasp"))]
    assert len(set(looks)) == len(looks) == 20, "masks that do not differ show nothing"
    for other in others:
        assert other == first

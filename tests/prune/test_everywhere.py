"""A mask is the same bits whatever kernels torch runs, with any number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
# What this machine can be made to run: another one shows up in the hashes of docs/vectors.json.
KERNELS = ["default", "avx2", "avx512"][
    : 1 + ["DEFAULT", "AVX2", "AVX512"].index(torch.backends.cpu.get_cpu_capability())
]


def in_a_process(kernels: str, threads: int, onednn: bool) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.prune.everywhere", "2", str(threads), str(int(onednn))]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": kernels}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_masks_do_not_depend_on_kernels_or_threads() -> None:
    found = {
        (kernels, threads, onednn): in_a_process(kernels, threads, onednn)
        for i, kernels in enumerate(KERNELS)
        # Every set of kernels with one thread and with two, with oneDNN and without.
        for threads, onednn in ([(1, True), (2, False)] if i % 2 else [(2, True), (1, False)])
    }
    assert {result["kernels"].lower() for result in found.values()} == set(KERNELS), "torch was not made to change"
    first, *others = (result["masks"] for result in found.values())
    assert len({digest for name, digest in first.items() if "ntk" in name}) == 10, (
        "masks that do not differ show nothing"
    )
    for other in others:
        assert other == first

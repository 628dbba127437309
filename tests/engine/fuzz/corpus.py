"""Valid programs of every kind, for the fuzzer to damage."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from tests.engine.programs import Case, lenet5, programs


def write_corpus(path: Path, n: int = 150) -> None:
    """Write about n valid programs into one file, each after its size."""
    found = [lenet5().bytes]

    @settings(
        max_examples=n, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def collect(case: Case) -> None:
        found.append(case.program.bytes)

    collect()
    path.write_bytes(b"".join(struct.pack("<I", len(data)) + data for data in found))

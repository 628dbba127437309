"""Valid programs of every kind, for the fuzzer to damage."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from foreseed.engine.program import Kind, Op, Program, assemble
from tests.engine.programs import Case, lenet5, programs


def grouped() -> Program:
    """A nearly dense conv whose groups have six channels each: the vector kernels take four, then one by one."""
    ops = [
        Op(Kind.CONV, 0, channels=4, groups=1, window=(1, 1, 1, 1, 0, 0)),
        Op(Kind.CONV, 1, flags=1, channels=12, groups=2, window=(3, 3, 1, 1, 1, 1)),
        Op(Kind.CONV, 2, channels=3, groups=1, window=(5, 5, 1, 1, 0, 0)),
    ]
    nearly_all = [i for i in range(12 * 2 * 9) if i % 8]
    return assemble((1, 5, 5), 3, [1 / 64], [-2.0], ops, [None, nearly_all, None])


def write_corpus(path: Path, n: int = 150) -> None:
    """Write about n valid programs into one file, each after its size."""
    # A program that stands there more often is damaged more often.
    found = [lenet5().bytes, *[grouped().bytes] * 8]

    @settings(
        max_examples=n, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def collect(case: Case) -> None:
        found.append(case.program.bytes)

    collect()
    path.write_bytes(b"".join(struct.pack("<I", len(data)) + data for data in found))

"""Valid programs of every kind, for the fuzzer to damage."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from foreseed.engine.ops import SHARED
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


def twice() -> Program:
    """A sparse conv and a norm used twice over, each over maps of two sizes."""
    norm = {"flags": 1, "groups": 2, "eps": 0.5}
    conv = {"flags": 1, "channels": 4, "groups": 2}
    ops = [
        Op(Kind.CONV, 0, channels=4, groups=1, window=(1, 1, 1, 1, 0, 0)),
        Op(Kind.CONV, 1, **conv, window=(3, 3, 1, 1, 1, 1)),
        Op(Kind.NORM, 2, **norm),
        Op(Kind.CONV, 3, **conv | {"flags": 1 | SHARED}, rice=1, window=(3, 3, 1, 1, 2, 2), dilation=(2, 2)),
        Op(Kind.NORM, 4, **norm | {"flags": 1 | SHARED}, rice=2),
        Op(Kind.CONV, 5, **conv | {"flags": 1 | SHARED}, rice=1, window=(3, 3, 2, 2, 1, 1)),
        Op(Kind.CONV, 6, channels=3, groups=1, window=(3, 3, 1, 1, 0, 0)),
    ]
    some = [i for i in range(4 * 2 * 9) if i % 3]
    return assemble((1, 5, 5), 3, [1 / 64], [-2.0], ops, [None, some, *[None] * 5])


def write_corpus(path: Path, n: int = 250) -> None:
    """Write about n valid programs into one file, each after its size."""
    # A program that stands there more often is damaged more often.
    found = [lenet5().bytes, *[grouped().bytes] * 8, *[twice().bytes] * 8]

    @settings(
        max_examples=n, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def collect(case: Case) -> None:
        found.append(case.program.bytes)

    collect()
    path.write_bytes(b"".join(struct.pack("<I", len(data)) + data for data in found))

"""The runs of a report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from foreseed.engine.errors import ForeseedError
from foreseed.runs import Run, read_run


class ReportError(ForeseedError):
    """A report that cannot be written."""


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read run folders in the order given, each once."""
    if not folders:
        raise ReportError("no run folder was given; name at least one, such as runs/ntk-baffle")
    return [read_run(folder) for folder in {Path(folder).resolve(): folder for folder in folders}.values()]

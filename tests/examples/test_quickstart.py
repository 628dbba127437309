"""The notebook runs from top to bottom, and is committed without what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_quickstart_runs_from_top_to_bottom(tmp_path: Path) -> None:
    script = "\n\n".join("".join(cell["source"]) for cell in CELLS)
    script += "\n\nassert result.accuracy > 0.6, result.accuracy\n"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "MPLBACKEND": "Agg"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of 360 test images" in done.stdout
    assert (tmp_path / "runs" / "ntk-baffle" / "summary.json").exists()


def test_the_quickstart_is_committed_without_outputs() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)

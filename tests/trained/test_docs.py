"""The commands of docs/use.md do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foreseed.cli import main
from foreseed.data import HeldOut
from tests.engine.toolchain import run

PAGE = (Path(__file__).parents[2] / "docs" / "use.md").read_text()


@pytest.mark.slow
def test_every_command_of_the_page_runs(
    runs: dict[str, Path], tests: HeldOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foreseed.meter.device.process_peak_bytes", lambda *_: None)
    Path("runs").mkdir()
    Path("runs/demo").symlink_to(runs["lenet5"])
    for label in (3, 7):
        image = Image.fromarray(tests.images[np.flatnonzero(tests.labels == label)[0]].transpose(1, 2, 0))
        for file in (Path(f"photos/{label}.png"), Path(f"labelled/{label}/one.png")):
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 12
    for line in lines:
        if line.startswith("foreseed "):
            assert main(shlex.split(line)[1:]) == 0, line
        else:
            run(["sh", "-c", line])
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {"images": tests.images[:2]})
    assert Path("again.onnx").exists()

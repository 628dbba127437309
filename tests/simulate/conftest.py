"""The data that the simulations share; pictures are not drawn again for every run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foreseed.simulate import run as run_module
from tests.simulate.small import write_bars


@pytest.fixture(scope="session")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pictures (they take longer than the rest of a small run), and torch's threads as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    import sys

    monkeypatch.setattr(sys.modules["foreseed.simulate.run"], "picture", lambda *_: None)
    yield
    torch.set_num_threads(threads)

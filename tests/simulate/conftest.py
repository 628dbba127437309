"""The data that the simulations share; what takes longer than a small run is left out of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.simulate.small import leave_out_the_slow, write_bars


@pytest.fixture(scope="session")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small runs in a second or less; and torch's threads stay as they were."""
    threads = torch.get_num_threads()
    leave_out_the_slow(monkeypatch.setattr)
    yield
    torch.set_num_threads(threads)

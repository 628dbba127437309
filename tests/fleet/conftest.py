"""What tests of whole runs share; those that leave out what is slow use the fixture `quick`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulate.small import leave_out_the_slow, write_bars


@pytest.fixture(scope="session")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)

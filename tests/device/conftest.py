"""What the tests of a device share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.scripted import write_shard


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A dozen images for the scripted server's network."""
    return write_shard(tmp_path / "shard.bin")

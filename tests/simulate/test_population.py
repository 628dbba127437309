"""Sharing out: the partition is the one that the config names."""

from __future__ import annotations

import pytest

from foreseed.config import load
from foreseed.engine import ForeseedError
from foreseed.simulate.population import partition_of


def test_unknown_partition_is_refused() -> None:
    config = load(None, ["data.set=digits"])
    changed = config.model_copy(update={"data": config.data.model_copy(update={"partition": "zipf"})})
    with pytest.raises(ForeseedError, match=r"data\.partition 'zipf': expected 'iid', 'k-classes' or 'dirichlet'"):
        partition_of(changed, [0, 1, 2])

"""Property-based tests draw the same examples in every CI run, and new ones everywhere else; none has a deadline."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Threads that wait for each other sleep. Two tests at a time on two cores, and all that they start, would else spend
# more on waiting than on work: torch reads it when it is loaded, here and in other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_LONGEST = (
    "test_install", "engine/test_portable", "prune/test_everywhere", "examples/test_flower", "simulate/test_on_ray",
    "prune/test_pruning", "engine/test_fuzz", "fleet/test_served", "fleet/test_cluster", "runs/test_trackers",
    "report/test_page", "prune/test_convolution", "test_docs",
)  # fmt: skip
"""Files that take longest, by what one core spends on them; those that are left out take less than half a minute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come first, so that those who share the files out (`make test`) end together."""
    rank = {Path(__file__).parent / f"{name}.py": at for at, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))

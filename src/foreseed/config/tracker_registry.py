"""The registry of trackers: `foreseed.runs.trackers` enters its own here, and the config asks who is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

entered: dict[str, Callable[[], Any]] = {}
"""What makes each tracker, by name; `foreseed.runs.enter_tracker` adds to it."""


def trackers() -> Mapping[str, Callable[[], Any]]:
    """All trackers by name. Imported when first asked for: most runs ask for none."""
    import_module("foreseed.runs.trackers")
    return entered

"""The backends that every engine test runs on: NumPy, and C wherever it was built."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest


@dataclass(frozen=True)
class Backend:
    """The functions of one backend (`functions.direction`, ...) and its engine."""

    functions: Any
    engine: Any


def _load(name: str) -> Backend:
    module = importlib.import_module(f"foreseed.engine.{name}")
    functions = importlib.import_module("foreseed.engine.reference_rng") if name == "reference" else module
    return Backend(functions, getattr(module, f"{name.capitalize()}Engine"))


BACKENDS = ["reference", "native"] if find_spec("foreseed.engine._native") else ["reference"]


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return _load(request.param)

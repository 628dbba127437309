"""The registry of methods: each file of `foreseed.methods` enters itself here, and the config asks who is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

entered: dict[str, Method] = {}
"""By name; `foreseed.config.enter` adds to it."""


@dataclass(frozen=True)
class Method:
    """A method by the name that a user types; `foreseed.methods.protocol` says what its functions take and return."""

    name: str
    summary: str
    """Half a sentence for those who choose."""
    init: Callable[..., Any]
    round: Callable[..., Any]
    device_memory: Callable[..., Any]
    """What a device holds, planned and observed."""
    prunes: bool = False
    """It starts from the mask that [prune] describes; the others start dense."""
    backpropagates: bool = False
    """Its devices do; a real fleet's cannot."""
    only_simulated: str = ""
    """Why a real fleet's devices cannot run it although they need not backpropagate; "" if they can."""
    settings: Any = None
    """The pydantic model (a `Table`) of a table of its own, [name] in an experiment; None if it has none."""


def methods() -> Mapping[str, Method]:
    """All methods by name. Imported when first asked for: a device's process never asks."""
    import_module("foreseed.methods")
    return entered

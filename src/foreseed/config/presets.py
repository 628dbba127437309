"""Settings under one name: what an experiment does not say itself comes from its preset."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # As the paper has it, or, where it is silent, the code that it builds on.
    "paper": {
        "model": {"init": "kaiming"},
        "prune": {"rescale": False, "redraws": 5, "redraw_weights": True, "batch": 256, "epsilon": 0.01},
        "train": {
            "k": 50, "sigma": 1e-4, "direction": "gaussian", "seeds": "per-device", "spread": 1, "blocks": 1,
            "difference": "forward", "local_steps": 1, "bits": 32, "optimiser": "sgd", "lr": 0.01, "momentum": 0.9,
            "weight_decay": 1e-3, "lr_decay": 0.998, "clip": 0.0, "rate": "fixed", "memory": False,
            "robust": "none",
        },
        "fleet": {"max_share": 1.0},
    },
    # What learnt best in our own measurements (docs/results.md) at the paper's forward passes and bytes.
    "best": {
        "model": {"activation": "hardswish", "init": "kaiming"},
        "prune": {"rescale": True},
        "train": {
            "spread": "auto", "passes": 51, "bytes_up": 256, "bits": 1, "blocks": 5, "sigma": 1e-4,
            "direction": "rademacher", "optimiser": "sgd", "lr": 0.05, "momentum": 0.9, "lr_decay": 0.998,
            "clip": 10.0, "rate": "noise", "memory": True,
        },
    },
}  # fmt: skip

_REPLY = 45
"""Bytes of a real device's reply beyond its packed differences, with a base loss and a scale.

So many are enough for 65,535 rounds, devices and images of a device, a process of 64 MiB and any time and state.
"""
_BLOCK = 5
"""And for each further block: a scale, and what is left of its last byte."""


def completed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with what their preset adds to them; a preset that is not known adds nothing, and is refused later."""
    given, name = dict(tables), tables.get("preset", "")
    for table, keys in PRESETS.get(name if isinstance(name, str) else "", {}).items():
        own = given.get(table, {})
        if isinstance(own, Mapping):
            # Who says how many directions there are has no use for a rule that chooses them.
            chosen = keys if "k" not in own else {key: x for key, x in keys.items() if (key, x) != ("spread", "auto")}
            given[table] = {**chosen, **own}
    return given


def directions(bytes_up: int, bits: int, blocks: int) -> int:
    """How many loss differences fit a reply."""
    return 8 * max(bytes_up - _beside(bits, blocks), 0) // bits


def fewest_bytes(bits: int, blocks: int) -> int:
    """Of a reply with one difference."""
    return _beside(bits, blocks) + ceil(bits / 8)


def _beside(bits: int, blocks: int) -> int:
    return _REPLY + (_BLOCK * (blocks - 1) if bits < 32 else 0)


def parts(k: int, passes: int, central: bool) -> int:
    """Parts of the images for k directions to take so many forward passes an image, at most."""
    return ceil(2 * k / passes) if central else ceil(k / (passes - 1))

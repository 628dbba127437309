"""The methods, one file each, to be read beside their papers."""

from __future__ import annotations

from types import ModuleType

from foreseed.methods import baffle, fedavg, ntk_baffle, ntk_fedavg

METHODS: dict[str, ModuleType] = {
    "ntk-baffle": ntk_baffle,
    "baffle": baffle,
    "fedavg": fedavg,
    "ntk-fedavg": ntk_fedavg,
}
"""Every method that can be named in a config; each module has `init(world)` and `round(world, fleet, state)`."""

"""How often a finite difference has the sign of the slope that it stands for: what replies of one bit live on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foreseed.bench.machine import describe_machine
from foreseed.config import load
from foreseed.methods import Task, ntk_baffle
from foreseed.simulate import Population, SimulatedDevices, prepare
from foreseed.wire import OrderMessage

MODELS = ("lenet5", "resnet20")
SIGMAS = (1e-2, 1e-3, 1e-4, 1e-5)
_PART = 16
"""Images that a direction is probed on."""
_SETTINGS = (
    "data.set=digits", "data.partition=iid", "data.devices=8", "data.per_round=2", "data.min_size=100", "workers=2",
    "prune.density=0.1", "prune.iterations=3", "prune.redraws=1", "prune.batch=32", "model.activation=hardswish",
    "model.norm=group",
)  # fmt: skip

Signs = npt.NDArray[np.bool_]


def bench_signs(
    k: int = 160,
    central: bool = False,
    models: Sequence[str] = MODELS,
    sigmas: Sequence[float] = SIGMAS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The share of directions whose difference has the sign of the exact slope, at the initial values.

    Two devices probe k directions each, every one on a part of some 16 images.
    """
    rows = []
    for model in models:
        progress(f"{model}: pruning")
        task, population = prepare(load(None, [*_SETTINGS, f"model.name={model}", f"train.k={k}"]))
        spread = min(k, int(population.partition.sizes.min()) // _PART)
        orders = [order._replace(spread=spread) for order in ntk_baffle.init(task).coordinator.open()]
        exact = _signs(task, population, "exact", orders)
        for sigma in sigmas:
            progress(f"{model}: sigma {sigma:g}")
            asked = [order._replace(sigma=sigma, central=central) for order in orders]
            share = float(np.mean(_signs(task, population, "difference", asked) == exact))
            rows.append({"model": model, "sigma": sigma, "agree": share})
    return {
        "rows": rows,
        "difference": "central" if central else "forward",
        "directions": k * len(orders),
        "images": _PART,
        "density": task.config.prune.density,
        "machine": describe_machine(),
    }


def _signs(task: Task, population: Population, engine: str, orders: Sequence[OrderMessage]) -> Signs:
    devices = SimulatedDevices(replace(task, config=task.config.with_({"engine": engine})), population)
    try:
        replies = devices.replies(orders, task.program, task.values)
    finally:
        devices.close()
    # As a reply of one bit has them: zero counts as positive.
    return np.array([array("f", reply.losses)[1:] for reply in replies]) < 0

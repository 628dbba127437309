"""What a run came to: accuracy, cost and memory, in the terms of the accounting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import fsum
from typing import Any

from foreseed.config import methods
from foreseed.methods import Devices, State, Task
from foreseed.runs.records import (
    Change,
    Estimates,
    FleetCosts,
    LayerCost,
    Memory,
    Pruning,
    Row,
    RunTotals,
    Shares,
    Summary,
    Totals,
    last_mean,
)

_LAST = 5


def summarise(
    task: Task, devices: Devices, state: State, rows: Sequence[Row], changes: Sequence[Change] = ()
) -> Summary:
    """The summary of a finished run."""
    config, program, method = task.config, state.program, methods()[task.config.method]
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    counts = {key: sum(getattr(row, key) for row in rows) for key in Totals.model_fields}
    device_rounds = sum(row.devices for row in rows)
    layers = [layer for layer in program.layers() if layer.n_dense]
    sizes, fleet = devices.sizes(), devices.costs([row.model_dump() for row in rows])
    summary: dict[str, Any] = {
        "name": config.run_name,
        "method": config.method,
        "engine": "backprop" if method.backpropagates else config.engine,
        "seed": config.seed,
        "rounds": len(rows),
        "model": config.model.name,
        "data": config.data.set,
        "n_live": program.n_live,
        "n_total": sum(p.numel() for p in task.model.parameters()),
        "density": sum(layer.n_weights for layer in layers) / sum(layer.n_dense for layer in layers),
        "macs": program.macs,
        "dense_macs": program.dense_macs,
        "final_accuracy": accuracies[-1],
        "max_accuracy": max(accuracies),
        "last_mean_accuracy": fsum(accuracies[-_LAST:]) / len(accuracies[-_LAST:]),
        "final_ema_accuracy": rows[-1].ema_accuracy,
        # fsum: the built-in sum of floats rounds differently from one Python version to the next.
        "total": RunTotals(**counts, seconds=fsum(row.seconds for row in rows)),
        "per_device_round": Totals(**{key: total / device_rounds for key, total in counts.items()}),
        "memory": Memory(**asdict(method.device_memory(task, state))),
        "layers": [
            LayerCost(**asdict(layer) | {"kind": layer.kind.name.lower(), "density": layer.density}) for layer in layers
        ],
        "pruning": _pruning(task),
        "partition": Shares(devices=len(sizes), sizes=tuple(sizes.tolist()), stated=fleet is not None),
    }
    if (estimates := Estimates.of(rows)) is not None:
        summary["estimates"] = estimates
    for key in ("personal_accuracy", "personal_density"):
        if (mean := last_mean(rows, key)) is not None:
            summary[key] = mean
    if changes:
        summary["changes"] = tuple(changes)
    if fleet is not None:
        summary["fleet"] = FleetCosts(**fleet)
    return Summary(**summary)


def _pruning(task: Task) -> Pruning | None:
    if task.pruning is None:
        return None
    cost = task.pruning.cost
    return Pruning(
        pruner=task.config.prune.pruner,
        seconds=task.pruning_seconds,
        device_bytes_up=cost.upload_bytes,
        device_bytes_down=cost.download_bytes,
        device_flops=max(cost.device_flops, default=0),
        bp_free=not cost.device_flops,
    )

"""What a run came to: accuracy, cost and memory, in the terms of DESIGN's accounting."""

from __future__ import annotations

from dataclasses import asdict
from math import fsum
from typing import Any, Literal

from foreseed.engine import Engine, Program
from foreseed.meter import MeterError, planned_bp_bytes, process_peak_bytes
from foreseed.simulate.world import World

_LAST = 5
_COUNTS = ("flops", "dense_flops", "forward_passes", "bytes_up", "bytes_down")


def summarise(world: World, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary of a finished run, as it goes into summary.json."""
    config, program = world.config, world.program
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    # Counts are whole numbers and stay exact; fsum rounds floats the same in every Python version, as sum does not.
    total = {key: sum(row[key] for row in rows) for key in _COUNTS} | {"seconds": fsum(row["seconds"] for row in rows)}
    device_rounds = sum(row["devices"] for row in rows)
    return {
        "name": config.run_name,
        "method": config.method,
        "engine": "backprop" if config.is_bp else config.engine,
        "seed": config.seed,
        "rounds": len(rows),
        "model": config.model.name,
        "data": config.data.set,
        "n_live": program.n_live,
        "n_total": sum(p.numel() for p in world.model.parameters()),
        "density": config.effective_density,
        "macs": program.macs,
        "dense_macs": program.dense_macs,
        "final_accuracy": accuracies[-1],
        "max_accuracy": max(accuracies),
        "last_mean_accuracy": fsum(accuracies[-_LAST:]) / len(accuracies[-_LAST:]),
        "final_ema_accuracy": rows[-1]["ema_accuracy"],
        "total": total,
        "per_device_round": {key: total[key] / device_rounds for key in _COUNTS},
        "memory": _memory(world),
        "layers": [
            asdict(layer) | {"kind": layer.kind.name.lower(), "density": layer.density}
            for layer in program.layers()
            if layer.n_dense
        ],
        "pruning": _pruning(world),
        "partition": {
            "devices": len(world.partition.sizes),
            "sizes": [int(size) for size in world.partition.sizes],
            "moved": world.partition.moved,
        },
    }


def _memory(world: World) -> dict[str, Any]:
    """Planned, observed and real-process memory of one device."""
    config = world.config
    if config.is_bp:
        planned = planned_bp_bytes(world.program, config.train.batch, config.train.momentum > 0)
        return {
            "planned_bytes": planned.total, "observed_bytes": None,
            "process_peak_bytes": _process_peak("bp", world.program, config.train.batch),
            "batch": config.train.batch,
            "note": "parameters, gradients, optimiser state and saved activations of dense tensors",
        }  # fmt: skip
    # One image at a time is enough, but for the statistics of a batch norm's batch.
    batch = config.train.batch if world.program.n_stats else 1
    engine = Engine(world.program, batch=batch)
    samples = world.samples(0)
    engine.loss(world.values, samples.part(0, min(samples.count, max(batch, 4))))
    return {
        "planned_bytes": engine.planned_bytes, "observed_bytes": engine.observed_bytes,
        "process_peak_bytes": _process_peak("bp-free", world.program, 1),
        "batch": batch, "note": "program, values, perturbed copy, activations and input of a lean device",
    }  # fmt: skip


def _process_peak(kind: Literal["bp", "bp-free"], program: Program, batch: int) -> int | None:
    """Measured in a process of its own; a machine that cannot start one does not undo the run."""
    try:
        return process_peak_bytes(kind, program, batch)
    except MeterError:
        return None


def _pruning(world: World) -> dict[str, Any] | None:
    if world.pruning is None:
        return None
    cost = world.pruning.cost
    return {
        "pruner": world.config.prune.pruner,
        "seconds": world.pruning_seconds,
        "device_bytes_up": cost.upload_bytes,
        "device_bytes_down": cost.download_bytes,
        "device_flops": max(cost.device_flops, default=0),
        "bp_free": not cost.device_flops,
    }

"""Small run folders that look like real ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENET = [
    ("conv1", "conv", 450, 352_800),
    ("conv2", "conv", 2_400, 240_000),
    ("fc1", "linear", 48_000, 48_000),
    ("fc2", "linear", 10_080, 10_080),
    ("fc3", "linear", 840, 840),
]
"""Name, kind, weights and multiply-adds of each layer."""

RESNET = [
    ("conv1", "conv", 432, 442_368),
    *(
        (f"block{b}.{i}.conv{c}", "conv", 2_304 * 4 ** (b - 1), 2_359_296)
        for b in (1, 2, 3)
        for i in range(3)
        for c in (1, 2)
    ),
    ("fc", "linear", 640, 640),
]

CEILING = {"fedavg": 0.97, "ntk-fedavg": 0.955, "ntk-baffle": 0.93, "baffle": 0.86}
"""Where the accuracy of a method ends."""


def write_run(
    folder: Path,
    method: str = "ntk-baffle",
    seed: int = 0,
    *,
    name: str = "",
    rounds: int = 60,
    eval_every: int = 5,
    density: float = 0.1,
    engine: str = "difference",
    ema: bool = False,
    process: bool = True,
    devices: int = 20,
    lr: float = 0.01,
    net: list[tuple[str, str, int, int]] = LENET,
    pruner: str = "ntk-rand",
) -> Path:
    """Write a run folder with plausible numbers: the same ones for the same arguments."""
    rng = random.Random(f"{method} {seed} {density} {lr} {pruner}")
    pruned = method.startswith("ntk")
    density = density if pruned else 1.0
    folder.mkdir(parents=True, exist_ok=True)
    layers = _layers(net, density, rng)
    shares = random.Random(seed)
    sizes = [max(10, int(25 * shares.paretovariate(1.2))) for _ in range(devices)]
    metrics = _metrics(method, rng, rounds, eval_every, layers, sizes, ema)
    summary = _summary(method, metrics, layers, sizes, process, pruned)
    if pruned:
        summary["pruning"]["pruner"] = pruner
    summary |= {
        "name": name or method,
        "engine": engine,
        "seed": seed,
        "model": "lenet5" if net is LENET else "resnet20",
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    (folder / "env.json").write_text(json.dumps(_ENVIRONMENT))
    (folder / "config.toml").write_text(
        f'method = "{method}"\nname = "{name or method}"\nseed = {seed}\nrounds = {rounds}\neval_every = {eval_every}\n'
        f'engine = "{engine}"  # difference: as a device; exact: fast sweeps\n\n[data]\nset = "digits"\n'
        f'devices = {devices}\n\n[prune]\npruner = "{pruner}"\ndensity = {density}\n\n[train]\nk = 50\nlr = {lr}\n'
    )
    return folder


def edit_summary(folder: Path, **changes: Any) -> None:
    """Change entries of a run's summary.json."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_metrics(folder: Path, **changes: Callable[[dict[str, Any]], Any]) -> None:
    """Change entries of every line of a run's metrics.jsonl, each by a function of the line."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    edited = [row | {key: change(row) for key, change in changes.items()} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in edited))


_ENVIRONMENT = {
    "foreseed": "0.1.0",
    "python": "3.11.9",
    "versions": {"torch": "2.6.0", "numpy": "2.2.1"},
    "machine": {"system": "Linux", "processor": "x86_64", "cores": 8},
    "isa": ["avx2", "fma"],
}


def _layers(net: list[tuple[str, str, int, int]], density: float, rng: random.Random) -> list[dict[str, Any]]:
    """Layers that keep more the fewer weights they have, as foresight pruning does."""
    largest = max(n for _, _, n, _ in net)
    rows = []
    for name, kind, n, macs in net:
        kept = min(1.0, density * (largest / n) ** 0.35 * rng.uniform(0.9, 1.1)) if density < 1 else 1.0
        live = max(1, round(kept * n))
        rows.append(
            {"name": name, "kind": kind, "n_weights": live, "n_dense": n, "density": live / n,
             "macs": round(macs * live / n), "dense_macs": macs}
        )  # fmt: skip
    return [
        *rows,
        {"name": "pool", "kind": "pool", "n_weights": 0, "n_dense": 0, "density": None, "macs": 0, "dense_macs": 0},
    ]


def _metrics(
    method: str, rng: random.Random, rounds: int, every: int, layers: list[dict[str, Any]], sizes: list[int], ema: bool
) -> list[dict[str, Any]]:
    bp = method.endswith("fedavg")
    live, dense = (2 * sum(layer[key] for layer in layers) for key in ("macs", "dense_macs"))
    n_live = sum(layer["n_weights"] for layer in layers)
    top, pace = CEILING.get(method, 0.9) + rng.uniform(-0.01, 0.01), (6 if bp else 20)
    rows = []
    for r in range(1, rounds + 1):
        samples = sum(rng.sample(sizes, min(10, len(sizes))))
        passes = samples * (3 if bp else 51)
        smooth = 0.1 + (top - 0.1) * (1 - math.exp(-r / pace))
        accuracy = min(1.0, max(0.0, smooth + rng.gauss(0, 0.012)))
        evaluated = r % every == 0 or r == rounds
        rows.append(
            {"round": r, "lr": 0.01 * 0.998**r, "train_loss": 2.4 * (1 - accuracy), "devices": 10, "samples": samples,
             "forward_passes": passes, "flops": passes * live, "dense_flops": passes * dense,
             "bytes_up": 10 * (4 * n_live if bp else 230), "bytes_down": 10 * (4 * n_live + 60),
             "seconds": 0.1 + passes * 1e-6, "accuracy": accuracy if evaluated else None,
             "loss": 0.05 + 2.4 * (1 - accuracy) if evaluated else None,
             "ema_accuracy": max(0.0, smooth - 0.1 * math.exp(-r / pace)) if evaluated and ema else None,
             "ema_loss": None}
        )  # fmt: skip
    return rows


def _summary(
    method: str,
    metrics: list[dict[str, Any]],
    layers: list[dict[str, Any]],
    sizes: list[int],
    process: bool,
    pruned: bool,
) -> dict[str, Any]:
    bp = method.endswith("fedavg")
    evaluated = [row["accuracy"] for row in metrics if row["accuracy"] is not None]
    keys = ("flops", "dense_flops", "forward_passes", "bytes_up", "bytes_down")
    total = {key: sum(row[key] for row in metrics) for key in (*keys, "seconds")}
    n_live, n_total = sum(x["n_weights"] for x in layers), sum(x["n_dense"] for x in layers)
    planned = 16 * n_total + 2_000_000 if bp else 12 * n_live + 90_000
    return {
        "method": method, "rounds": len(metrics), "data": "digits", "n_live": n_live, "n_total": n_total,
        "density": n_live / n_total, "macs": sum(x["macs"] for x in layers),
        "dense_macs": sum(x["dense_macs"] for x in layers), "final_accuracy": evaluated[-1],
        "max_accuracy": max(evaluated), "last_mean_accuracy": sum(evaluated[-5:]) / len(evaluated[-5:]),
        "final_ema_accuracy": metrics[-1]["ema_accuracy"], "total": total,
        "per_device_round": {key: total[key] / len(metrics) / 10 for key in keys},
        "memory": {"planned_bytes": planned, "observed_bytes": None if bp else planned - 1_200,
                   "process_peak_bytes": (310_000_000 if bp else 19_400_000) if process else None,
                   "batch": 32, "note": "one device"},
        "layers": layers,
        "pruning": {"pruner": "ntk-rand", "seconds": 8.4, "device_bytes_up": 0, "device_bytes_down": 0,
                    "device_flops": 0, "bp_free": True} if pruned else None,
        "partition": {"devices": len(sizes), "sizes": sizes, "moved": 0},
    }  # fmt: skip

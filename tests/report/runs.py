"""Small run folders that look like real ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foreseed.report import bars, curves
from foreseed.runs.folder import RunFolder
from foreseed.runs.records import LayerCost, Memory, Pruning, Row, RunTotals, Shares, Summary, Totals, to_json

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
    stated: bool = False,
) -> Path:
    """Write a run folder with plausible numbers: the same ones for the same arguments."""
    rng = random.Random(f"{method} {seed} {density} {lr} {pruner}")
    pruned, bp = method.startswith("ntk"), method.endswith("fedavg")
    density = density if pruned else 1.0
    folder.mkdir(parents=True, exist_ok=True)
    layers = _layers(net, density, rng)
    shares = random.Random(seed)
    sizes = tuple(max(10, int(25 * shares.paretovariate(1.2))) for _ in range(devices))
    rows = _rows(method, rng, rounds, eval_every, layers, sizes, ema)
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    counts = {key: sum(getattr(row, key) for row in rows) for key in Totals.model_fields}
    n_live, n_total = _sum(layers, "n_weights"), _sum(layers, "n_dense")
    planned = 16 * n_total + 2_000_000 if bp else 12 * n_live + 90_000
    summary = Summary(
        name=name or method,
        method=method,
        engine="backprop" if bp else engine,
        seed=seed,
        rounds=rounds,
        model="lenet5" if net is LENET else "resnet20",
        data="digits",
        n_live=n_live,
        n_total=n_total,
        density=density,
        macs=_sum(layers, "macs"),
        dense_macs=_sum(layers, "dense_macs"),
        final_accuracy=accuracies[-1],
        max_accuracy=max(accuracies),
        last_mean_accuracy=sum(accuracies[-5:]) / len(accuracies[-5:]),
        final_ema_accuracy=rows[-1].ema_accuracy,
        total=RunTotals(**counts, seconds=sum(row.seconds for row in rows)),
        per_device_round=Totals(**{key: total / rounds / min(10, devices) for key, total in counts.items()}),
        memory=Memory(
            planned_bytes=planned,
            observed_bytes=None if bp else planned - 1_200,
            process_peak_bytes=(310_000_000 if bp else 19_400_000) if process else None,
            batch=32 if bp else 1,
            note="one device",
        ),
        layers=tuple(layers),
        pruning=Pruning(
            pruner=pruner, seconds=8.4, device_bytes_up=0, device_bytes_down=0, device_flops=0, bp_free=True
        )
        if pruned
        else None,
        partition=Shares(devices=devices, sizes=sizes, stated=stated),
    )
    (folder / "metrics.jsonl").write_bytes(b"".join(to_json(row) + b"\n" for row in rows))
    RunFolder(folder).finish(summary)
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


def leave_out_figures(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Half of a report's figures, for tests that look at others or at none: drawing is most of the work."""
    set_attribute(curves, "SPENT", curves.SPENT[:1])
    set_attribute(curves, "loss", lambda *_: None)
    set_attribute(bars, "layers", lambda *_: [])


_ENVIRONMENT = {
    "foreseed": "0.1.0",
    "python": "3.11.9",
    "versions": {"torch": "2.6.0", "numpy": "2.2.1"},
    "machine": {"system": "Linux", "processor": "x86_64", "cores": 8},
    "isa": ["avx2", "fma"],
}


def _layers(net: list[tuple[str, str, int, int]], density: float, rng: random.Random) -> list[LayerCost]:
    """Layers that keep more the fewer weights they have, as foresight pruning does."""
    largest = max(n for _, _, n, _ in net)
    layers = []
    for name, kind, n, macs in net:
        kept = min(1.0, density * (largest / n) ** 0.35 * rng.uniform(0.9, 1.1)) if density < 1 else 1.0
        live = max(1, round(kept * n))
        layers.append(
            LayerCost(
                name=name, kind=kind, n_weights=live, n_dense=n, density=live / n,
                macs=round(macs * live / n), dense_macs=macs,
            )
        )  # fmt: skip
    return [*layers, LayerCost(name="pool", kind="pool", n_weights=0, n_dense=0, density=None, macs=0, dense_macs=0)]


def _sum(layers: Sequence[LayerCost], key: str) -> int:
    return sum(int(getattr(layer, key)) for layer in layers)


def _rows(
    method: str, rng: random.Random, rounds: int, every: int, layers: list[LayerCost], sizes: Sequence[int], ema: bool
) -> list[Row]:
    bp, asked = method.endswith("fedavg"), min(10, len(sizes))
    live, dense, n_live = 2 * _sum(layers, "macs"), 2 * _sum(layers, "dense_macs"), _sum(layers, "n_weights")
    top, pace = CEILING.get(method, 0.9) + rng.uniform(-0.01, 0.01), (6 if bp else 20)
    rows = []
    for r in range(1, rounds + 1):
        participants = rng.sample(range(len(sizes)), asked)
        samples = sum(sizes[device] for device in participants)
        passes = samples * (3 if bp else 51)
        smooth = 0.1 + (top - 0.1) * (1 - math.exp(-r / pace))
        accuracy = min(1.0, max(0.0, smooth + rng.gauss(0, 0.012)))
        evaluated = r % every == 0 or r == rounds
        rows.append(
            Row(
                round=r,
                lr=0.01 * 0.998**r,
                train_loss=2.4 * (1 - accuracy),
                devices=asked,
                samples=samples,
                forward_passes=passes,
                flops=passes * live,
                dense_flops=passes * dense,
                participants=tuple(sorted(participants)),
                bytes_up=asked * (4 * n_live if bp else 230),
                bytes_down=asked * (4 * n_live + 60),
                seconds=0.1 + passes * 1e-6,
                accuracy=accuracy if evaluated else None,
                loss=0.05 + 2.4 * (1 - accuracy) if evaluated else None,
                ema_accuracy=max(0.0, smooth - 0.1 * math.exp(-r / pace)) if evaluated and ema else None,
                ema_loss=None,
            )
        )
    return rows

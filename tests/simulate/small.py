"""A small world to simulate: bars to tell apart, models of a few hundred weights, and what a run comes to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from foreseed.config import Config, load
from foreseed.coordinator import Coordinator
from foreseed.meter import device
from foreseed.methods import Task, ntk_baffle
from foreseed.simulate import Population, SimulatedDevices, experiment, prepare
from foreseed.wire import Reply
from tests.methods.small import digits

TINY, WITH_BATCH_NORM = ("tests.simulate.small:tiny", "tests.simulate.small:with_batch_norm")


def tiny(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3), nn.Hardswish(), nn.Flatten(), nn.Linear(4 * 4 * 4, 8), nn.Hardswish(),
        nn.Linear(8, classes),
    )  # fmt: skip


def with_batch_norm(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3, bias=False), nn.BatchNorm2d(4), nn.Hardswish(), nn.Flatten(),
        nn.Linear(4 * 4 * 4, classes),
    )  # fmt: skip


def write_bars(path: Path, train: int = 120, test: int = 60) -> Path:
    """A data set of 16x16 images in four classes."""
    (images, labels), (test_images, test_labels) = digits(train, seed=1), digits(test, seed=2)
    np.savez(path, train_images=images, train_labels=labels, test_images=test_images, test_labels=test_labels)
    return path


def small_config(bars: Path, **changes: Any) -> Config:
    """A run of a second or less; `changes` by key, with __ for the dot."""
    base = {
        "rounds": 5, "eval_every": 2, "workers": 1, "data.set": str(bars), "data.devices": 6, "data.per_round": 3,
        "data.beta": 1.0, "data.min_size": 4, "model.name": TINY, "prune.density": 0.3, "prune.iterations": 2,
        "prune.redraws": 1, "prune.batch": 8, "train.k": 6, "train.lr": 0.01, "train.batch": 8,
        "train.lr_decay": 0.998, "train.clip": 0.0, "train.robust": "none", "fleet.max_share": 1.0,
    }  # fmt: skip
    return load().with_(base | {key.replace("__", "."): value for key, value in changes.items()})


class World(NamedTuple):
    """A task and the devices that it is learnt on."""

    task: Task
    population: Population

    @property
    def config(self) -> Config:
        return self.task.config

    def changed(self, **changes: Any) -> World:
        """The same under other settings, which do not shape it."""
        config = self.config.with_({key.replace("__", "."): x for key, x in changes.items()})
        return World(replace(self.task, config=config), self.population)

    @contextmanager
    def devices(self) -> Iterator[SimulatedDevices]:
        devices = SimulatedDevices(*self)
        try:
            yield devices
        finally:
            devices.close()

    def ask(self) -> tuple[Coordinator, list[Reply]]:
        """The first round up to its replies."""
        coordinator = ntk_baffle.init(self.task).coordinator
        with self.devices() as devices:
            return coordinator, devices.replies(coordinator.open(), self.task.program, coordinator.state.values)


def make_world(config: Config) -> World:
    return World(*prepare(config))


def leave_out_the_slow(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """No pictures and no processes to measure: each takes longer than the rest of a small run."""
    set_attribute(experiment, "picture", lambda *_: None)
    set_attribute(device, "process_peak_bytes", lambda *_: None)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without what a clock says."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be equal in two runs that are equal."""
    summary = json.loads((folder / "summary.json").read_text())
    del summary["total"]["seconds"], summary["name"]
    if summary["pruning"]:
        del summary["pruning"]["seconds"]
    with np.load(folder / "checkpoint" / "state.npz") as file:
        state = {name: file[name].tobytes() for name in file.files}
    return {"rows": rows_of(folder), "summary": summary, "state": state, "model": (folder / "model.fsp").read_bytes()}

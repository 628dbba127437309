"""An experiment on simulated devices, from the config to the summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreseed.config import Config
from foreseed.data import load, picture
from foreseed.methods import Task, make_task
from foreseed.prune import Step
from foreseed.runs import Summary, Watch, prune_watch, run
from foreseed.simulate.devices import SimulatedDevices
from foreseed.simulate.example import Example
from foreseed.simulate.on_ray import RayHands, connect
from foreseed.simulate.population import Population

Prepared = tuple[Task, Population]


def prepare(config: Config, progress: Callable[[Step], None] | None = None) -> Prepared:
    """Load, share out, build, prune and compile, as the config says."""
    data = load(*config.data.source)
    population = Population.of(config, data)
    return make_task(config, data.held_out, progress, population.images_to_prune_by), population


def run_simulated(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    at: int | None = None,
    changes: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    like: Example | None = None,
    prepared: Prepared | None = None,
    on: str = "",
) -> Summary:
    """Run a config on simulated devices in a folder; with `resume`, go on where a killed run was.

    `at` and `changes`, and all that is done to a folder, are those of `foreseed.runs.run`. `like` is a run whose
    devices are asked, round by round, each with the images that it had there. What was `prepared` may be shared by
    several runs. `on` is a Ray cluster that works for the devices (`foreseed.simulate.on_ray`); threads do, if not.
    """
    population: Population

    def task_and_devices(config: Config) -> tuple[Task, SimulatedDevices]:
        nonlocal population
        if on:
            connect(on)  # pruning takes its time, and an address may be wrong
        task, population = prepared or prepare(config, prune_watch(config, watch))
        task = replace(task, config=config)
        if like is not None:
            population = population.renumbered(like.holders(population.partition.sizes.tolist()))
        participants = None if like is None else like.participants
        return task, SimulatedDevices(
            task, population, participants, elsewhere=RayHands(on, task, population) if on else None
        )

    check = None if like is None else like.check
    summary = run(config, folder, task_and_devices, resume=resume, at=at, changes=changes, watch=watch, check=check)
    for name in ("partition.svg", "partition.png"):
        if not (folder / "figures" / name).exists():
            picture(population.partition, population.classes, folder / "figures" / name)
    return summary

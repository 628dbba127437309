"""An experiment on simulated devices, from the config to the summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from foreseed.config import Config
from foreseed.data import load, picture
from foreseed.methods import Task, make_task
from foreseed.prune import Step
from foreseed.runs import Summary, Watch, prune_watch, run
from foreseed.simulate.devices import SimulatedDevices
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
    watch: Watch | None = None,
    participants: Sequence[Sequence[int]] | None = None,
    prepared: Prepared | None = None,
) -> Summary:
    """Run a config on simulated devices in a folder; with `resume`, go on where a killed run was.

    `participants` of every round are sampled, if not given; what was `prepared` may be shared by several runs.
    """

    def task_and_devices() -> tuple[Task, SimulatedDevices]:
        task, population = prepared or prepare(config, prune_watch(config, watch))
        figures = folder / "figures"
        figures.mkdir(exist_ok=True)
        for name in ("partition.svg", "partition.png"):
            if not (figures / name).exists():
                picture(population.partition, population.classes, figures / name)
        return task, SimulatedDevices(task, population, participants)

    return run(config, folder, task_and_devices, resume=resume, watch=watch)

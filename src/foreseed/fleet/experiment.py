"""An experiment on real devices, from the config to the summary: no training image is needed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreseed.config import Config
from foreseed.data import load_held_out
from foreseed.fleet.devices import FleetDevices, Table, check
from foreseed.methods import Task, make_task
from foreseed.runs import Lease, Summary, Watch, prune_watch, run
from foreseed.transport.link import Broker


def run_served(
    config: Config,
    folder: Path,
    broker: Broker,
    say: Callable[[str], None],
    *,
    resume: bool = False,
    at: int | None = None,
    changes: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    look: Callable[[Table], None] | None = None,
    task: Task | None = None,
    names: Mapping[str, int] | None = None,
    lease: Lease | None = None,
) -> Summary:
    """Run a config on the devices that a broker reaches; `look` is shown who is there, again and again.

    `names` are those that are enrolled, with their numbers: nobody else takes part then.
    `at` and `changes` are those of `foreseed.runs.run`. The `lease` is one of this folder.
    """
    held = Lease(folder) if lease is None else lease

    def task_and_devices(config: Config) -> tuple[Task, FleetDevices]:
        check(config)
        made = _make(config, watch) if task is None else replace(task, config=config)
        say(f"serving {config.run_name} at {broker}")
        return made, FleetDevices(made, folder, broker, say, held, look, names)

    return run(config, folder, task_and_devices, resume=resume, at=at, changes=changes, watch=watch, lease=held)


def _make(config: Config, watch: Watch | None) -> Task:
    tests = load_held_out(*config.data.source)
    return make_task(config, tests, prune_watch(config, watch))

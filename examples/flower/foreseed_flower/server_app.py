"""The ServerApp: an experiment of foreseed on the nodes of a federation. It writes the folder that any run has."""

from __future__ import annotations

import shlex
from dataclasses import replace
from logging import ERROR, INFO
from pathlib import Path

from flwr.app import Context, UserConfig
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from foreseed.cli.experiment import ask
from foreseed.config import Config
from foreseed.data import load_held_out
from foreseed.engine import ForeseedError
from foreseed.fleet.devices import check
from foreseed.methods import Task, make_task
from foreseed.report import write_report
from foreseed.runs import Lease, Progress, prune_watch, run
from foreseed_flower.devices import FlowerDevices

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Serve the run that `--run-config` asks for."""
    try:
        serve(grid, context.run_config)
    except ForeseedError as error:
        log(ERROR, "foreseed: %s", error)
        raise error.with_traceback(None) from None


def serve(grid: Grid, options: UserConfig) -> None:
    words = [str(options["experiment"]), *shlex.split(str(options["overrides"]))]
    out = Path(str(options["out"])) if options["out"] else None
    asked = ask([word for word in words if word], out, bool(options["resume"]), None)
    lease = Lease(asked.folder, say=_say)

    def task_and_devices(config: Config) -> tuple[Task, FlowerDevices]:
        check(config)
        task = make_task(config, load_held_out(*config.data.source), prune_watch(config, _watch))
        _say(f"serving {config.run_name}; its folder is {asked.folder.resolve()}")
        return replace(task, config=config), FlowerDevices(task, asked.folder, grid, lease, _say)

    check(asked.config)
    run(asked.config, asked.folder, task_and_devices, **asked.how, watch=_watch, lease=lease)
    _say(f"report: {write_report([asked.folder], asked.folder)}")


def _watch(progress: Progress) -> None:
    if progress.note:
        _say(progress.note)
    if progress.row is not None:
        accuracy = "" if progress.accuracy is None else f", test accuracy {progress.accuracy:.3f}"
        _say(f"round {progress.done} of {progress.total}: loss {progress.row.train_loss:.4f}{accuracy}")


def _say(line: str) -> None:
    log(INFO, "foreseed: %s", line)

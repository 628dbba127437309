"""`foreseed sweep`: one experiment at many settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from foreseed.cli.experiment import Json, On, Quiet, file_and_overrides, seed_numbers
from foreseed.config import ConfigError

if TYPE_CHECKING:
    from foreseed.sweep import Outcome

_SHOWN = 30
"""Lines of the table; the rest stands in the report's CSV."""


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="An experiment, then key=a,b,c to sweep over (or key=low..high with --random), key=value."),
    ] = None,
    random: Annotated[int, typer.Option(min=0, help="Draw so many settings instead of trying every combination.")] = 0,
    seeds: Annotated[str, typer.Option(help="Seeds to repeat every setting with, such as 0,1,2.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time, each on a core; 0 = as many as cores.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where runs and report go; runs/sweep if not given.")] = None,
    on: On = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment at many settings, several at a time, and rank them.

    What is finished in --out is not run again and what was stopped there goes on, so the same command resumes a sweep.

    Example: foreseed sweep demo train.lr=0.005,0.01,0.02 train.momentum=0.5,0.9 rounds=50

    Draws from ranges: foreseed sweep demo train.lr=0.001..0.1 train.k=20..200 --random 16
    """
    from foreseed.sweep import make_points, parse_axes, run_all

    file, overrides = file_and_overrides(words or [])
    axes, plain = parse_axes(overrides)
    found = make_points(file, axes, plain, seed_numbers(seeds) if seeds else [], random)
    folder, console = out or Path("runs") / "sweep", Console(stderr=True, markup=False, highlight=False)

    def told(outcome: Outcome, done: int) -> None:
        if not (quiet or as_json):
            console.print(f"{done}/{len(found)} {outcome.point.named.name}: {_said(outcome)}", soft_wrap=True)

    outcomes = run_all(found, folder, jobs or os.cpu_count() or 1, told, on)
    finished = [outcome for outcome in outcomes if outcome.summary is not None]
    if not finished:
        raise ConfigError(f"none of {len(outcomes)} runs came to its end; the first said: {outcomes[0].failure}")
    _report(finished, [o for o in outcomes if o.failure], list(axes), folder, as_json)


def _report(finished: list[Outcome], failed: list[Outcome], keys: list[str], folder: Path, as_json: bool) -> None:
    from foreseed.report import write_report
    from foreseed.report.arms import group
    from foreseed.report.read import read_runs
    from foreseed.report.sweeps import ranked
    from foreseed.report.words import percent

    folders = [outcome.folder for outcome in finished]
    page, arms = write_report(folders, folder, swept=keys), ranked(group(read_runs(folders)))
    by_folder = {outcome.folder: outcome.point.settings for outcome in finished}
    rows = [(by_folder[arm.runs[0].folder], arm) for arm in arms]
    if as_json:
        lines: list[dict[str, Any]] = [
            {"settings": settings, "seeds": arm.seeds, "last_mean_accuracy": arm.numbers["last_mean_accuracy"].mean}
            for settings, arm in rows
        ]
        failures = [{"settings": o.point.settings, "seed": o.point.config.seed, "reason": o.failure} for o in failed]
        print(json.dumps({"report": str(page), "ranked": lines, "failed": failures}))
        return
    console = Console(markup=False, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("", *keys, "last five", "highest"):
        table.add_column(header, justify="right")
    for place, (settings, arm) in enumerate(rows[:_SHOWN], 1):
        told = (percent(arm.numbers[name]) for name in ("last_mean_accuracy", "max_accuracy"))
        table.add_row(str(place), *(settings[key] for key in keys), *told)
    console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN} more, in {folder / 'figures' / 'sweep.csv'}")
    for outcome in failed:
        console.print(f"failed: {outcome.point.named.name}: {outcome.failure}", soft_wrap=True)
    console.print(f"report: {page}", soft_wrap=True)


def _said(outcome: Outcome) -> str:
    if outcome.summary is None:
        return f"failed: {outcome.failure}"
    return f"{100 * outcome.summary.last_mean_accuracy:.1f} %"

"""`foreseed runs`: which runs there are, how far they are, and which rounds one can go back to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foreseed.cli.experiment import Json
from foreseed.engine.errors import ForeseedError


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Run folders, or folders of them; runs if none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs; of a single one, the checkpoints that are kept and what was changed in it.

    Example: foreseed runs runs/ntk-baffle
    """
    found = [run for folder in folders or [Path("runs")] for run in _runs_in(folder)]
    if as_json:
        print(json.dumps([_told(run) for run in found]))
        return
    console = Console(markup=False, highlight=False)
    console.print(_table([_told(run) for run in found]))
    if len(found) == 1:
        _print_one(console, found[0])
    else:
        console.print("name one of them to see its checkpoints: foreseed runs FOLDER")


def _runs_in(folder: Path) -> list[Path]:
    if (folder / "config.toml").exists():
        return [folder]
    found = sorted(path.parent for level in ("*", "*/*") for path in folder.glob(f"{level}/config.toml"))
    if not found:
        raise ForeseedError(f"{folder}: no run is there; name a run's folder, or start one with `foreseed run`")
    return found


def _told(folder: Path) -> dict[str, Any]:
    from foreseed.config import load
    from foreseed.runs import Kept, changes_of, rows_so_far
    from foreseed.runs.status import is_running

    rows, kept = rows_so_far(folder), Kept(folder / "checkpoint")
    accuracy = {row.round: row.accuracy for row in rows}
    state = "running" if is_running(folder) else "over" if (folder / "summary.json").exists() else "stopped"
    return {
        "run": str(folder),
        "state": state,
        "round": len(rows),
        "rounds": load(folder / "config.toml").rounds,
        "accuracy": next((row.accuracy for row in reversed(rows) if row.accuracy is not None), None),
        "kept": [
            {"round": round, "accuracy": accuracy.get(round), "bytes": kept.bytes_of(round)} for round in kept.rounds()
        ],
        "changes": [change.model_dump() for change in changes_of(folder)],
    }


def _table(told: list[dict[str, Any]]) -> Table:
    table = Table("run", "state", "round", "accuracy", "can go back to")
    for run in told:
        rounds = [str(kept["round"]) for kept in run["kept"]]
        table.add_row(
            run["run"], run["state"], f"{run['round']} of {run['rounds']}", _percent(run["accuracy"]), ", ".join(rounds)
        )
    return table


def _print_one(console: Console, folder: Path) -> None:
    from foreseed.runs import changes_of, described

    told = _told(folder)
    table = Table("kept round", "accuracy", "bytes")
    for kept in told["kept"]:
        table.add_row(str(kept["round"]), _percent(kept["accuracy"]), f"{kept['bytes']:,}")
    console.print(table)
    for change in changes_of(folder):
        console.print(f"after round {change.round}: {described(change)}", soft_wrap=True)
    if earlier := [kept["round"] for kept in told["kept"] if kept["round"] < told["round"]]:
        console.print(
            f"go back: foreseed run --out {folder} --resume --at {earlier[-1]} (or foreseed serve); "
            "keys after it change what may change, such as train.lr=0.001",
            soft_wrap=True,
        )


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.2f} %"

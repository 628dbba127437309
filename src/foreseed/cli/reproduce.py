"""`foreseed reproduce`: the paper's tables and figures, made again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from foreseed.cli.bench import progress_lines
from foreseed.cli.experiment import Asked, Json, On, Quiet, run_one, whole_runs
from foreseed.config import Config, ConfigError

NONE = "–"

if TYPE_CHECKING:
    from foreseed.paper import Item, PaperArm
    from foreseed.paper.memory import MethodMemory
    from foreseed.paper.table import ComparedArm
    from foreseed.runs import Summary


def reproduce(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WHAT [KEY=VALUE]...", help="table1, figure2, ..., then overrides.")
    ] = None,
    arms: Annotated[str, typer.Option(help="Only arms whose line has one of these words, such as LeNet,NTK.")] = "",
    out: Annotated[Path, typer.Option(help="Where runs lie; what is finished there is not run again.")] = Path(
        "runs/paper"
    ),
    on: On = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a table or figure of the paper again, beside what the paper says; without a name, list them.

    As the paper has them most take days, so make them smaller: rounds=100 model.name=lenet5 engine=exact.

    Example: foreseed reproduce table2 --arms LeNet rounds=100 model.name=lenet5
    """
    from foreseed.paper import ITEMS, find_item

    names = [word for word in words or [] if "=" not in word]
    overrides = [word for word in words or [] if "=" in word]
    if not names:
        for item in ITEMS.values():
            print(f"{item.name:9}{item.caption}" + (f" ({len(item.arms)} runs)" if item.arms else ""))
        return
    if len(names) > 1:
        raise ConfigError(f"{' '.join(names)}: expected one table or figure at a time")
    item = find_item(names[0])
    if item.arms:
        _train(item, arms, overrides, out, on, as_json, quiet)
    else:
        if on:
            raise ConfigError(f"--on {on}: {item.name} is measured on this machine; leave --on out")
        _measure(item, overrides, as_json)


def _chosen(item: Item, wanted: str) -> list[PaperArm]:
    words = [word.strip().lower() for word in wanted.split(",") if word.strip()]
    found = [arm for arm in item.arms if not words or any(word in arm.label.lower() for word in words)]
    if not found:
        labels = "; ".join(arm.label for arm in item.arms)
        raise ConfigError(f"--arms {wanted}: no arm of {item.name} has such a word; they are {labels}")
    return found


def _train(item: Item, wanted: str, overrides: list[str], out: Path, on: str, as_json: bool, quiet: bool) -> None:
    from foreseed.paper import comparison_rows
    from foreseed.report import write_report

    arms = _chosen(item, wanted)
    configs = [arm.config(overrides) for arm in arms]  # all are checked before the first is run
    folders = [out / config.run_name for config in configs]
    if on:
        summaries = whole_runs(configs, folders, on, quiet or as_json)
    else:
        summaries = [_summary(config, at, quiet or as_json) for config, at in zip(configs, folders, strict=True)]
    rows, page = comparison_rows(arms, summaries), write_report(folders, out / item.name)
    if as_json:
        print(json.dumps({"item": item.name, "report": str(page), "arms": [row.as_json() for row in rows]}))
        return
    console = Console(markup=False, highlight=False)
    console.print(_compared(item, rows))
    console.print(f"report: {page}", soft_wrap=True)


def _summary(config: Config, folder: Path, quiet: bool) -> Summary:
    """Of the run that lies there finished, or else is run now, from where it was."""
    from foreseed.runs import Summary, is_finished, read_run

    if is_finished(folder, config):
        return read_run(folder).summary
    return Summary(**run_one(Asked(config, folder, resume=(folder / "config.toml").exists()), quiet))


def _compared(item: Item, rows: list[ComparedArm]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{item.name}: {item.caption}", caption_justify="left", padding=(0, 1, 0, 0)
    )
    table.caption = (
        f"After {rows[0].rounds} rounds here (in the paper). Highest test accuracy in %, and the mean of the last five "
        "tests; FLOPs and planned memory of a device in times FedAvg's; bytes of a device and round."
    )
    table.add_column("arm\ndensity", overflow="fold")
    for header in ("highest\nlast five", "FLOPs", "memory", "bytes up\nbytes down"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.arm}\n{100 * row.density:.3g} %",
            f"{_beside(row.accuracy, row.said['accuracy'], '.1f')}\n{row.last_accuracy:.1f}",
            _beside(row.flops, row.said["flops"], ".2f"),
            _beside(row.memory, row.said["memory"], ".2f"),
            f"{row.bytes_up:,.0f}\n{row.bytes_down:,.0f}",
        )
    return table


def _beside(here: float | None, paper: float | None, digits: str) -> str:
    mine = NONE if here is None else f"{here:{digits}}"
    return mine if paper is None else f"{mine} ({paper:{digits}})"


def _measure(item: Item, overrides: list[str], as_json: bool) -> None:
    from foreseed.paper import device_memories

    with progress_lines() as progress:
        rows = device_memories(item.name, overrides, progress)
    if as_json:
        lines: list[dict[str, Any]] = [asdict(row) for row in rows]
        print(json.dumps({"item": item.name, "rows": lines}))
        return
    console = Console(markup=False, highlight=False)
    console.print(f"{item.name}: {item.caption}\n", soft_wrap=True)
    for model in dict.fromkeys(row.model for row in rows):
        console.print(_memories(model, [row for row in rows if row.model == model]))
    console.print(
        "Planned: all that the method must hold, to the byte. Process: the peak of a real device process, interpreter "
        f"and libraries included. In brackets, in times FedAvg's. {item.note[0].upper()}{item.note[1:]}.",
        soft_wrap=True,
    )
    for note, images in dict.fromkeys((row.memory.note, row.memory.batch) for row in rows):
        alike = dict.fromkeys(r.method for r in rows if (r.memory.note, r.memory.batch) == (note, images))
        many = "1 image" if images == 1 else f"{images} images"
        console.print(f"  {', '.join(alike)}, {many} at a time: {note}", soft_wrap=True)


def _memories(model: str, rows: list[MethodMemory]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=model, title_justify="left", padding=(0, 1, 0, 0))
    for header in ("method", "prunes", "BP-free", "planned", "process", "paper"):
        table.add_column(header, justify="left" if header == "method" else "right", no_wrap=True)
    dense = next(row.memory for row in rows if row.method == "fedavg")
    for row in rows:
        memory = row.memory
        table.add_row(
            row.method, _yes(row.prunes), _yes(row.bp_free),
            _times(memory.planned_bytes, dense.planned_bytes),
            _times(memory.process_peak_bytes, dense.process_peak_bytes), row.said or NONE,
        )  # fmt: skip
    return table


def _times(here: int | None, dense: int | None) -> str:
    return NONE if here is None or dense is None else f"{here / 1e6:.3g} MB ({here / dense:.2g}x)"


def _yes(it: bool) -> str:
    return "yes" if it else "no"

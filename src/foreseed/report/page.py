"""The report itself: one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import foreseed
from foreseed.report.arms import Arm, Stat, differing, flat, group, settings
from foreseed.report.canvas import Drawing
from foreseed.report.colours import method_variable, variables
from foreseed.report.figures import draw_figures
from foreseed.report.inline import inline_svg
from foreseed.report.read import ReportError, read_runs
from foreseed.report.sweeps import ranked
from foreseed.report.table import SummaryRow, parts, shown, summary_row
from foreseed.report.words import NONE, listed, percent
from foreseed.runs.folder import damaged

ENGINES = {
    "difference": "devices without backpropagation probe finite differences of losses, as real ones do",
    "exact": "the simulator computes exact directional derivatives, the limit of a device’s finite differences",
    "backprop": "devices compute gradients by backpropagation",
}


_SHOWN = 8
"""Arms of a sweep that are shown one by one, the best ones."""


def write_report(
    runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], swept: Sequence[str] = ()
) -> Path:
    """Write `report.html` and its figures about the given run folders into `out`; returns the page's path.

    Runs that differ in their seed alone are one arm: means with their spread. Of a sweep over some keys, all runs are
    in one figure, and the best are shown as any others are.
    """
    arms = group(read_runs(runs))
    folder = Path(out)
    shown = ranked(arms)[:_SHOWN] if swept else arms
    try:
        page = _render(shown, draw_figures(shown, folder / "figures", (arms, swept) if swept else None))
        target = folder / "report.html"
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{folder}: the report cannot be written here ({error}); choose another folder") from error
    return target


def _render(arms: Sequence[Arm], drawings: Sequence[Drawing]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = [summary_row(arm) for arm in arms]
    return environment.get_template("report.html.j2").render(
        version=foreseed.__version__,
        colours=variables(),
        title=_title(rows),
        lede=_lede(arms),
        cards=[_card(row) for row in rows],
        parts=parts(rows),
        engines={row.engine: ENGINES.get(row.engine, "") for row in rows},
        seeds=max(len(row.seeds) for row in rows),
        several=len(rows) > 1,
        figures={section: [_figure(d) for d in drawings if d.section == section] for section in _sections(drawings)},
        pruning=_pruning(arms),
        differences=_differences(arms),
        configs=[(arm.label, _seeds(arm.seeds), arm.runs[0].config_text) for arm in arms],
        environments=_environments(arms),
    )


def _sections(drawings: Sequence[Drawing]) -> list[str]:
    return list(dict.fromkeys(drawing.section for drawing in drawings))


def _title(rows: Sequence[SummaryRow]) -> str:
    data = listed(list(dict.fromkeys(row.data for row in rows)))
    if len(rows) == 1:
        return f"{rows[0].arm} on {data}"
    return f"{len(rows)} arms on {data}"


def _lede(arms: Sequence[Arm]) -> str:
    def all_of(values: Sequence[int], what: str) -> str:
        low, high = min(values), max(values)
        number = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"{number} {what if high == 1 else what + 's'}"

    models = listed(list(dict.fromkeys(arm.first.model for arm in arms)))
    devices = all_of([arm.first.partition.devices for arm in arms], "device")
    return f"{models}, {devices}, {all_of([arm.first.rounds for arm in arms], 'round')}"


def _card(row: SummaryRow) -> dict[str, str]:
    accuracy, whole = row.numbers["final_accuracy"], row.numbers["n_live"].mean == row.numbers["n_total"].mean
    return {
        "arm": row.arm,
        "variable": method_variable(row.method),
        "accuracy": f"{100 * accuracy.mean:.1f}",
        "spread": f"± {100 * accuracy.std:.1f} %" if accuracy.std is not None else "%",
        "method": row.method,
        "engine": row.engine,
        "weights": "dense" if whole else f"{percent(Stat(row.numbers['density'].mean, None))} of the weights",
        "seeds": _seeds(row.seeds),
    }


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {listed([str(seed) for seed in seeds])}"


def _figure(drawing: Drawing) -> dict[str, Any]:
    from markupsafe import Markup

    try:
        svg = inline_svg(drawing.svg, drawing.name, themed=drawing.source is None)
    except ElementTree.ParseError as error:
        raise damaged(drawing.source or Path(drawing.name), str(error)) from error
    return {
        "name": drawing.name,
        "title": drawing.title,
        "caption": drawing.caption,
        "wide": drawing.source is not None,
        "svg": Markup(svg),
        "csv": "data:text/csv;base64," + base64.b64encode(drawing.csv.encode()).decode(),
    }


def _pruning(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """What finding each arm's mask cost, as words."""
    return [
        {
            "arm": arm.label,
            "variable": method_variable(arm.first.method),
            "pruner": arm.first.pruning.pruner,
            "time": shown("pruning.seconds", arm.numbers),
            "flops": _or_nothing(shown("pruning.device_flops", arm.numbers)),
            "up": _or_nothing(shown("pruning.device_bytes_up", arm.numbers)),
            "down": _or_nothing(shown("pruning.device_bytes_down", arm.numbers)),
            "bp_free": "none" if arm.first.pruning.bp_free else "needed",
        }
        for arm in arms
        if arm.first.pruning is not None
    ]


def _or_nothing(text: str) -> str:
    return "nothing" if text.startswith("0\u00a0") else text


def _differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """The settings in which the arms differ, as TOML values."""
    firsts = [arm.runs[0] for arm in arms]
    tables = [settings(run) for run in firsts]
    return [
        (key, [json.dumps(table[key], ensure_ascii=False) if key in table else NONE for table in tables])
        for key in differing(firsts)
    ]


def _environments(arms: Sequence[Arm]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The machines that the runs ran on, each once, with the arms that ran there."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        for run in arm.runs:
            names = found.setdefault(json.dumps(run.environment), [])
            if arm.label not in names:
                names.append(arm.label)
    return [
        (listed(names), [(key, _worded(value)) for key, value in flat(json.loads(text))])
        for text, names in found.items()
    ]


def _worded(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return NONE if value is None else str(value)

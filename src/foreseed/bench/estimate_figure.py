"""The figure of `foreseed bench estimate`: measured points over the law's lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from foreseed.report.canvas import publish, style, table_text
from foreseed.report.colours import LIGHT, method_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "estimate"
"""Of the files."""

_PRUNED, _DENSE, _PLAIN = method_colour("ntk-baffle"), method_colour("baffle"), LIGHT["plain"]
_COLUMNS = (
    "sweep", "series", "density", "pruner", "steps", "n_live", "k", "spread", "bits", "kind", "error", "error_se",
    "error_law", "cosine", "cosine_se", "cosine_law", "progress", "progress_se", "progress_law",
)  # fmt: skip


class _Panel(NamedTuple):
    title: str
    sweep: str
    x: str
    y: str
    x_label: str
    y_label: str


_ERROR, _COSINE = "error / |g|²", "cosine with g"
_PANELS = (
    _Panel("a  more directions", "k", "k", "error", "K", _ERROR),
    _Panel("b  the same as a cosine", "k", "k", "cosine", "K", _COSINE),
    _Panel("c  fewer images a direction", "spread", "spread", "error", "spread", _ERROR),
    _Panel("d  fewer bits a difference", "bits", "bits", "error", "bits", _ERROR),
    _Panel("e  fewer live weights, K fixed", "density", "n_live", "error", "n_live", _ERROR),
    _Panel("f  what a step gains from it", "density", "n_live", "progress", "n_live", "cosine² |g|²"),
)
_MARKERS = {
    "density 0.1, float32": ("o", _PRUNED, _PRUNED), "density 0.1, rademacher": ("x", _PRUNED, _PRUNED),
    "density 0.1, one bit": ("o", _PRUNED, "white"), "dense, float32": ("s", _DENSE, _DENSE),
    "K fixed": ("o", _PRUNED, _PRUNED), "K fixed, initial values": ("^", _PRUNED, _PRUNED),
    "passes fixed": ("o", _PLAIN, _PLAIN), "passes fixed, initial values": ("^", _PLAIN, _PLAIN),
    "passes fixed, one bit": ("o", _PLAIN, "white"), "K fixed, rademacher": ("x", _PRUNED, _PRUNED),
    "bytes fixed": ("D", _PLAIN, _PLAIN), "ntk-rand mask": ("o", _PRUNED, _PRUNED),
    "random mask": ("v", _PLAIN, _PLAIN), "dense": ("s", _DENSE, _DENSE),
}  # fmt: skip
"""Of a series: marker, colour, filling."""


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the figure as SVG and PNG, with its numbers as CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style()):
        figure = Figure(figsize=(7.6, 8.4))
        for axes, panel in zip(figure.subplots(3, 2).flat, _PANELS, strict=True):
            _draw(axes, panel, [row for row in rows if row["sweep"] == panel.sweep])
        flat = [{**row, **row["net"]} for row in rows]
        publish(figure, folder, NAME, table_text(_COLUMNS, [[row[name] for name in _COLUMNS] for row in flat]))


def _draw(axes: Axes, panel: _Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    for series in dict.fromkeys(row["series"] for row in rows):
        marker, colour, fill = _MARKERS[series]
        here = [row for row in rows if row["series"] == series]
        x = [row[panel.x] for row in here]
        laws = [row[f"{panel.y}_law"] for row in here]
        if panel.y == "progress":
            # Every network has a gradient of its own: between two of them there is no line.
            axes.plot(x, laws, "_", color=colour, ms=16)
        else:
            axes.plot(x, laws, "-", color=colour, lw=1.0)
        # Two standard errors either way; most are smaller than the marker.
        bars = [2 * row[f"{panel.y}_se"] for row in here]
        axes.errorbar(
            x, [row[panel.y] for row in here], bars, fmt=marker, ms=4.5, color=colour, mfc=fill, elinewidth=0.9,
            label=series,
        )  # fmt: skip
    axes.set_xscale("log")
    if panel.y == "progress":
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    ticks = sorted({row[panel.x] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(True)
    if panel.y == "error" or panel.sweep != "k":
        axes.legend(fontsize=7, frameon=False)

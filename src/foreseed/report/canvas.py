"""What all figures share: paper, pens, and how a figure is put into its files."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foreseed.report.arms import Arm
from foreseed.report.colours import LIGHT, method_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Section = Literal["accuracy", "device", "data"]

WIDTH = 4.6
"""Inches; a phone shows a figure of this width with letters that can be read."""

_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Drawing:
    """A figure of the report: what it shows in one sentence, and the text of its SVG and CSV files."""

    name: str
    section: Section
    title: str
    caption: str
    svg: str
    csv: str
    source: Path | None = None
    """The file of a picture that a run drew itself: for the page's whole width, on white paper."""


@dataclass(frozen=True)
class Pen:
    """How an arm's line is drawn: the method's colour, and a dash and marker that tell arms of one method apart."""

    colour: str
    dash: str
    marker: str


def pens(arms: Sequence[Arm]) -> list[Pen]:
    """A pen for each arm."""
    if len(arms) == 1:
        return [Pen(method_colour(arms[0].first.method), "-", ".")]
    used: Counter[str] = Counter()
    result = []
    for i, arm in enumerate(arms):
        method = arm.first.method
        result.append(Pen(method_colour(method), _DASHES[used[method] % len(_DASHES)], _MARKERS[i % len(_MARKERS)]))
        used[method] += 1
    return result


def style() -> Any:
    """Matplotlib settings of every figure; letters stay letters in SVG, so that they can be read, found and copied."""
    return {
        "font.family": "DejaVu Sans", "font.size": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": LIGHT["muted"], "axes.linewidth": 0.8,
        "axes.labelcolor": LIGHT["ink"], "text.color": LIGHT["ink"], "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["muted"], "xtick.labelcolor": LIGHT["ink"], "ytick.labelcolor": LIGHT["ink"],
        "grid.color": LIGHT["line"], "grid.linewidth": 0.8, "axes.axisbelow": True, "lines.linewidth": 1.8,
        "figure.facecolor": LIGHT["paper"], "axes.facecolor": LIGHT["paper"], "savefig.facecolor": LIGHT["paper"],
        "svg.fonttype": "none", "svg.hashsalt": "foreseed", "figure.constrained_layout.use": True,
    }  # fmt: skip


def sheet(height: float) -> Figure:
    """An empty figure of the report's width."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height))


def legend(figure: Figure, axes: Axes) -> None:
    """Name the lines above the figure, in as many columns as fit, and give the figure the height that this takes."""
    handles, names = axes.get_legend_handles_labels()
    # Inches that the longest name takes, with its line and the gap after it.
    widest = 0.075 * max(len(name) for name in names) + 0.5
    columns = max(1, min(len(names), int(WIDTH / widest)))
    rows = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 0.18 * rows)
    figure.legend(
        handles, names, loc="outside upper left", ncols=columns, frameon=False, handlelength=2.4, columnspacing=1.4
    )


def short(name: str, letters: int = 40) -> str:
    """A name that fits into a figure; a longer one loses its middle."""
    if len(name) <= letters:
        return name
    return f"{name[: letters // 2 - 1]}…{name[-(letters // 2) :]}"


def table_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def publish(figure: Figure, folder: Path, name: str, numbers: str) -> str:
    """Write a figure as SVG and PNG with its numbers as CSV; returns the SVG's text."""
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    # Laid out once is enough for both files.
    figure.set_layout_engine("none")
    figure.savefig(folder / f"{name}.png", dpi=200)
    (folder / f"{name}.svg").write_text(svg.getvalue(), encoding="utf-8")
    (folder / f"{name}.csv").write_text(numbers, encoding="utf-8")
    return svg.getvalue()

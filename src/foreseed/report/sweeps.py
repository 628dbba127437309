"""The figure of a sweep: the accuracy of every setting that was tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreseed.report.arms import Arm, settings
from foreseed.report.canvas import Drawing, publish, sheet, short, table_text
from foreseed.report.colours import LIGHT
from foreseed.report.words import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RAMP = "YlGnBu"
"""Light is low, dark is high; it reads the same in grey, and for the colour-blind."""
_DARK = 0.55
"""Share of the ramp from which letters on it are white."""
_MOST_CELLS = 12
"""Columns and rows of a heat map whose numbers can be read."""


def ranked(arms: Sequence[Arm]) -> list[Arm]:
    """The best first, by the mean of their last tests."""
    return sorted(arms, key=lambda arm: -accuracy(arm))


def accuracy(arm: Arm) -> float:
    """What a sweep ranks by: the mean of the last five tests, over seeds."""
    return arm.numbers["last_mean_accuracy"].mean


def sweep(arms: Sequence[Arm], keys: Sequence[str], folder: Path) -> Drawing:
    """A heat map of two keys whose every pair was tried, else a line for each setting across all keys."""
    values = [_ordered({_value(arm, key) for arm in arms}) for key in keys]
    whole = len(keys) == 2 and len(arms) == len(values[0]) * len(values[1])
    is_map = whole and max(map(len, values)) <= _MOST_CELLS
    figure = _heat_map(arms, keys, values) if is_map else _parallel(arms, keys, values)
    best = ranked(arms)[0]
    rows = [(*(_value(arm, key) for key in keys), f"{accuracy(arm):.4f}", len(arm.seeds)) for arm in ranked(arms)]
    numbers = table_text([*keys, "last_mean_accuracy", "seeds"], rows)
    svg = publish(figure, folder, "sweep", numbers)
    told = ", ".join(f"{key} = {_value(best, key)}" for key in keys)
    reached = percent(best.numbers["last_mean_accuracy"])
    caption = (
        f"Mean of the last five tests of {len(arms)} settings; the best, {reached}, has {told}. The other figures show "
        "the best of them."
    )
    return Drawing("sweep", "accuracy", "What was swept", caption, svg, numbers)


def _value(arm: Arm, key: str) -> Any:
    return arm.runs[0].summary.seed if key == "seed" else settings(arm.runs[0]).get(key)


def _ordered(values: set[Any]) -> list[Any]:
    """Numbers by size, words by the alphabet."""
    numbers = all(isinstance(value, int | float) for value in values)
    return sorted(values) if numbers else sorted(values, key=str)


def _heat_map(arms: Sequence[Arm], keys: Sequence[str], values: Sequence[list[Any]]) -> Figure:
    across, down = values
    cells = np.full((len(down), len(across)), np.nan)
    for arm in arms:
        cells[down.index(_value(arm, keys[1])), across.index(_value(arm, keys[0]))] = 100 * accuracy(arm)
    figure = sheet(1.3 + 0.34 * len(down))
    axes = figure.subplots()
    axes.imshow(cells, cmap=_RAMP, aspect="auto")
    low, high = cells.min(), cells.max()
    for row in range(len(down)):
        for column in range(len(across)):
            share = (cells[row, column] - low) / (high - low) if high > low else 0.0
            ink = "white" if share > _DARK else "black"  # whatever the page's own colours: the cell's stay
            axes.text(column, row, f"{cells[row, column]:.1f}", ha="center", va="center", color=ink)
    axes.set_xticks(range(len(across)), [short(str(value), 12) for value in across])
    axes.set_yticks(range(len(down)), [short(str(value), 20) for value in down])
    axes.set_xlabel(keys[0])
    axes.set_ylabel(keys[1])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _parallel(arms: Sequence[Arm], keys: Sequence[str], values: Sequence[list[Any]]) -> Figure:
    """One axis a key, with its values in order, and accuracy on the last; the best lines are drawn last, on top."""
    import matplotlib as mpl

    heights = [accuracy(arm) for arm in arms]
    low, high = min(heights), max(heights)

    def share(height: float) -> float:
        return (height - low) / (high - low) if high > low else 0.5

    figure = sheet(3.2)
    axes = figure.subplots()
    ramp = mpl.colormaps[_RAMP]
    for arm in reversed(ranked(arms)):
        places = [_place(_value(arm, key), its) for key, its in zip(keys, values, strict=True)]
        at = share(accuracy(arm))
        axes.plot([*places, at], color=ramp(0.25 + 0.75 * at), linewidth=1.2, marker="o", markersize=3)
    for i, its in enumerate(values):
        _mark(axes, i, [(_place(value, its), short(str(value), 12)) for value in _few(its)])
    _mark(axes, len(keys), [(share(height), f"{100 * height:.1f} %") for height in (low, high)])
    axes.set_xticks(range(len(keys) + 1), [*(short(key.rpartition(".")[2], 14) for key in keys), "accuracy"])
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(keys) + 0.45)
    axes.grid(axis="x")
    axes.spines[:].set_visible(False)
    return figure


def _place(value: Any, values: list[Any]) -> float:
    return values.index(value) / (len(values) - 1) if len(values) > 1 else 0.5


def _few(values: list[Any]) -> list[Any]:
    """All of a few values, the ends and the middle of many."""
    return values if len(values) <= 8 else [values[0], values[len(values) // 2], values[-1]]


def _mark(axes: Axes, x: int, marks: Sequence[tuple[float, str]]) -> None:
    for y, text in dict(marks).items():
        ground = {"facecolor": LIGHT["paper"], "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
        axes.text(x + 0.05, y, text, fontsize=7.5, va="center", color=LIGHT["muted"], bbox=ground)

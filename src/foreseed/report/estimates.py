"""The figure of how well the server's estimates point, and of the learning rate that follows from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import fsum, isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from foreseed.report.arms import Arm, Curve, Stat, settings
from foreseed.report.canvas import Drawing, legend, pens, publish, sheet, short, table_text
from foreseed.report.curves import SPENT, along_axis, draw_curve
from foreseed.report.words import listed, percent
from foreseed.runs import Row, Run
from foreseed.runs.records import Estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOW = 20
"""Rounds of the running mean: one round's ratio is mostly chance, and twenty still follow training."""
_FEWEST = 5
"""Rounds that a line begins after: a mean of fewer would be the figure's highest point, by chance."""


def signal(arms: Sequence[Arm], folder: Path) -> Drawing | None:
    """The cosine between estimate and gradient, with the rate where one follows it; None if no arm tells."""
    curves = [(arm, curve) for arm in arms if (curve := arm.curve_of(cosines)) is not None]
    if not curves:
        return None
    rates = [(arm, _rate(arm)) for arm, _ in curves] if any(_follows(arm) for arm, _ in curves) else []
    panels = [curves, rates] if rates else [curves]
    figure = sheet(4.1 if rates else 2.9)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=(3, 2)[: len(panels)])[:, 0]
    drawn = dict(zip((arm.label for arm in arms), pens(arms), strict=True))
    for axes, lines in zip(grid, panels, strict=True):
        for arm, curve in lines:
            draw_curve(axes, curve.rounds, curve, drawn[arm.label], short(arm.label), 1)
        along_axis(axes, [curve.rounds for _, curve in lines], SPENT[0])
        axes.set_xlabel("")
    grid[-1].set_xlabel(SPENT[0].label)
    grid[0].set_ylabel("cosine of estimate\nand gradient")
    # Few arms come near 1; where all lie at 0, an axis that ends there would hide them.
    grid[0].set_ylim(-0.01, min(max(grid[0].get_ylim()[1], 0.1), 1.02))
    if rates:
        _rate_axis(grid[1], [curve for _, curve in rates])
    if len(arms) > 1:
        legend(figure, grid[0])
    numbers = _numbers(curves)
    svg = publish(figure, folder, "signal", numbers)
    caption = _caption([arm for arm, _ in curves], named=len(arms) > 1)
    return Drawing("signal", "accuracy", "Signal in the estimates", caption, svg, numbers)


def cosines(run: Run) -> list[float | None]:
    """The cosine between estimate and gradient in each round, by the mean ratio of the last rounds that told one."""
    fewest = min(_FEWEST, len(run.rounds))
    last: deque[float] = deque(maxlen=_WINDOW)
    found: list[float | None] = []
    for snr in (row.snr for row in run.rounds):
        told = snr is not None and isfinite(snr)
        if snr is not None and told:
            last.append(snr)
        found.append(_cosine(fsum(last) / len(last)) if told and len(last) >= fewest else None)
    return found


def _cosine(snr: float) -> float:
    # A ratio below 0 is one too small to tell from 0.
    signal = max(snr, 0.0)
    return sqrt(signal / (1 + signal))


def _follows(arm: Arm) -> bool:
    return settings(arm.runs[0]).get("train.rate") == "noise"


def _rate(arm: Arm) -> Curve:
    curve = arm.curve_of(_each(lambda row: row.lr))
    assert curve is not None  # every row has its rate, and an arm's seeds have the same rounds
    return curve


def _each(value: Callable[[Row], float | None]) -> Callable[[Run], list[float | None]]:
    return lambda run: [value(row) for row in run.rounds]


def _rate_axis(axes: Axes, rates: Sequence[Curve]) -> None:
    low, high = min(curve.mean.min() for curve in rates), max(curve.mean.max() for curve in rates)
    if high > 30 * low > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("learning rate")


def _numbers(curves: Sequence[tuple[Arm, Curve]]) -> str:
    """One row for each arm and round: the line's point, and the round's own numbers as means over seeds."""
    beside = {"snr": lambda row: row.snr, "remembered": lambda row: row.remembered, "lr": lambda row: row.lr}
    rows: list[list[object]] = []
    for arm, curve in curves:
        found = [arm.curve_of(_each(value)) for value in beside.values()]
        own = [{} if its is None else dict(zip(its.rounds, its.mean, strict=True)) for its in found]
        for i, number in enumerate(curve.rounds):
            row: list[object] = [arm.label, arm.first.method, arm.first.engine, len(arm.seeds), int(number)]
            row += [float(curve.mean[i]), "" if curve.std is None else float(curve.std[i])]
            row += [float(its[number]) if number in its else "" for its in own]
            rows.append(row)
    return table_text(["arm", "method", "engine", "seeds", "round", "cosine", "cosine_std", *beside], rows)


def _caption(arms: Sequence[Arm], named: bool) -> str:
    """What the last quarter of the rounds came to: single rounds say little, and it decides how a run ends."""

    def of(label: str, words: str) -> str:
        return f"{words} ({label})" if named else words

    last = {arm.label: [quarter for run in arm.runs if (quarter := Estimates.of(run.rounds))] for arm in arms}
    ends = {label: Stat.of(_cosine(one.snr) for one in its).mean for label, its in last.items() if its}
    text = (
        "Cosine between the server’s estimate and the true gradient (1: no noise, 0: noise alone), "
        f"measured over {_WINDOW} rounds from how far apart devices’ estimates are"
    )
    if not any(ends.values()):
        text += ": too small to tell in the last quarter of the rounds"
    else:
        highest_and_lowest = sorted(ends, key=lambda label: -ends[label])[:: max(1, len(ends) - 1)]
        said = [of(label, f"{ends[label]:.2f}" if ends[label] else "too small to tell") for label in highest_and_lowest]
        text += f": in the last quarter of the rounds {listed(said)}"
    if followers := [arm.label for arm in arms if _follows(arm)]:
        text += f"; the learning rate {of(listed(followers), 'follows it')}"
    shares = {label: [one.remembered for one in its if one.remembered is not None] for label, its in last.items()}
    counted = [of(label, percent(Stat(Stat.of(its).mean, None))) for label, its in shares.items() if its]
    if counted:
        text += f"; of what the server remembers, {listed(counted)} counted"
    return f"{text}."

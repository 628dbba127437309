"""Figures of what an arm reached against what it had spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from foreseed.report.arms import Arm, Array, Curve, Quantity, Stat
from foreseed.report.canvas import Drawing, Pen, legend, pens, publish, sheet, short, table_text
from foreseed.report.colours import LIGHT
from foreseed.report.words import amount, listed, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOG_RATIO = 8
"""Arms whose lines end so many times apart are drawn on a logarithmic axis, or the shorter would be a stroke."""


@dataclass(frozen=True)
class Spent:
    """What a horizontal axis counts."""

    key: Literal["rounds", "flops", "bytes"]
    label: str
    unit: str
    title: str


SPENT = (
    Spent("rounds", "round", "", "Accuracy against rounds"),
    Spent("flops", "FLOPs of all devices so far", "FLOP", "Accuracy against computation"),
    Spent("bytes", "bytes of all devices so far, up and down", "B", "Accuracy against communication"),
)


def accuracy(arms: Sequence[Arm], spent: Spent, folder: Path) -> Drawing:
    """Test accuracy against rounds, FLOPs or bytes."""
    figure = sheet(2.9)
    axes = figure.subplots()
    curves = [(arm, _curve(arm, "accuracy")) for arm in arms]
    averaged = [(arm, arm.curve("ema_accuracy")) for arm in arms] if spent.key == "rounds" else []
    for (arm, curve), pen in zip(curves, pens(arms), strict=True):
        draw_curve(axes, _along(curve, spent), curve, pen, short(arm.label), 100)
    for (_, ema), pen in zip(averaged, pens(arms)[: len(averaged)], strict=True):
        if ema is not None:
            axes.plot(
                _along(ema, spent), 100 * ema.mean, ":", color=LIGHT["ink"] if len(arms) == 1 else pen.colour, lw=1.3
            )
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 101))
    axes.set_ylabel("test accuracy (%)")
    along_axis(axes, [_along(curve, spent) for _, curve in curves], spent)
    if len(arms) > 1:
        legend(figure, axes)
    name = f"accuracy_{spent.key}"
    with_ema = [(arm, ema) for arm, ema in averaged if ema is not None]
    numbers = _numbers(curves, "accuracy") if not with_ema else _numbers(curves, "accuracy", "ema_accuracy", with_ema)
    caption = _caption_rounds(curves, bool(with_ema)) if spent.key == "rounds" else _caption_cost(curves, spent)
    return Drawing(name, "accuracy", spent.title, caption, publish(figure, folder, name, numbers), numbers)


def loss(arms: Sequence[Arm], folder: Path) -> Drawing | None:
    """Test loss against rounds; None if no arm measured it."""
    curves = [(arm, curve) for arm in arms if (curve := arm.curve("loss")) is not None]
    if not curves:
        return None
    figure = sheet(2.9)
    axes = figure.subplots()
    drawn = dict(zip((arm.label for arm in arms), pens(arms), strict=True))
    for arm, curve in curves:
        draw_curve(axes, curve.rounds, curve, drawn[arm.label], short(arm.label), 1)
    seen = np.concatenate([curve.mean[np.isfinite(curve.mean) & (curve.mean > 0)] for _, curve in curves])
    if seen.size and seen.max() > 30 * seen.min():
        axes.set_yscale("log")
    axes.set_ylabel("test loss (cross-entropy, nats)")
    along_axis(axes, [curve.rounds for _, curve in curves], SPENT[0])
    if len(curves) > 1:
        legend(figure, axes)
    numbers = _numbers(curves, "loss")
    svg = publish(figure, folder, "loss_rounds", numbers)
    return Drawing("loss_rounds", "accuracy", "Test loss against rounds", _caption_loss(curves), svg, numbers)


def _curve(arm: Arm, quantity: Quantity) -> Curve:
    curve = arm.curve(quantity)
    # Reading a run makes sure of it: the seeds of an arm share their settings, so they evaluate the same rounds.
    assert curve is not None
    return curve


def _along(curve: Curve, spent: Spent) -> Array:
    return {"rounds": curve.rounds, "flops": curve.flops, "bytes": curve.bytes}[spent.key]


def draw_curve(axes: Axes, along: Array, curve: Curve, pen: Pen, name: str, scale: float) -> None:
    """An arm's line, with its spread over seeds as a band."""
    mean = np.where(np.isfinite(curve.mean), curve.mean * scale, np.nan)
    # Markers stand a part of the figure's width apart, on whatever axis.
    axes.plot(along, mean, pen.dash, color=pen.colour, marker=pen.marker, ms=4, markevery=0.07, label=name)
    if curve.std is not None:
        std = np.where(np.isfinite(curve.std), curve.std * scale, np.nan)
        axes.fill_between(along, mean - std, mean + std, color=pen.colour, alpha=0.16, lw=0)


def along_axis(axes: Axes, along: Sequence[Array], spent: Spent) -> None:
    """Ticks and name of what was spent; logarithmic where arms end far apart."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    ends = [a[-1] for a in along]
    if min(ends) > 0 and max(ends) > _LOG_RATIO * min(ends):
        axes.set_xscale("log")
        first, last = min(a[a > 0].min() for a in along), max(ends)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if last > 300 * first else (1.0, 3.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=spent.key == "rounds"))
    axes.xaxis.set_major_formatter(
        "{x:,.0f}" if spent.key == "rounds" else EngFormatter(unit="B" if spent.key == "bytes" else "")
    )
    axes.set_xlabel(spent.label)
    axes.grid(True)


def _numbers(
    curves: Sequence[tuple[Arm, Curve]],
    quantity: str,
    other: str = "",
    others: Sequence[tuple[Arm, Curve]] = (),
) -> str:
    """One row for each arm and evaluated round, at full precision."""
    beside = {arm.label: dict(zip(curve.rounds, curve.mean, strict=True)) for arm, curve in others}
    header = ["arm", "method", "engine", "seeds", "round", "flops", "bytes", quantity, f"{quantity}_std"]
    rows: list[list[object]] = []
    for arm, curve in curves:
        for i, number in enumerate(curve.rounds):
            row: list[object] = [arm.label, arm.first.method, arm.first.engine, len(arm.seeds), int(number)]
            row += [float(curve.flops[i]), float(curve.bytes[i]), float(curve.mean[i])]
            row.append("" if curve.std is None else float(curve.std[i]))
            if other:
                mean = beside.get(arm.label, {}).get(number)
                row.append("" if mean is None else float(mean))
            rows.append(row)
    return table_text([*header, *([other] if other else [])], rows)


def _caption_rounds(curves: Sequence[tuple[Arm, Curve]], averaged: bool) -> str:
    ends = {arm.label: Stat(float(curve.mean[-1]), None) for arm, curve in curves}
    thin = "; the thin dots are the accuracy of the averaged weights (EMA)" if averaged else ""
    if len(curves) == 1:
        curve = curves[0][1]
        best = int(curve.mean.argmax())
        return (
            f"Test accuracy at each evaluation, highest in round {curve.rounds[best]:,.0f} with "
            f"{percent(Stat(float(curve.mean[best]), None))}{thin}."
        )
    first, last = max(ends, key=lambda a: ends[a].mean), min(ends, key=lambda a: ends[a].mean)
    return (
        f"Test accuracy at each evaluation: {first} ends highest with {percent(ends[first])}, "
        f"{last} lowest with {percent(ends[last])}{thin}."
    )


def _caption_cost(curves: Sequence[tuple[Arm, Curve]], spent: Spent) -> str:
    """What the highest accuracy that all arms have seen cost each of them."""
    target = min(float(curve.mean.max()) for _, curve in curves)
    costs = {arm.label: float(_along(c, spent)[int((c.mean >= target).argmax())]) for arm, c in curves}
    reached = percent(Stat(target, None))
    if len(costs) == 1:
        what = "computing" if spent.key == "flops" else "sending and receiving"
        cost = _cost(next(iter(costs.values())), spent)
        return f"The devices reached {reached}, their best, after {what} {cost} together."
    cheap, dear = min(costs, key=lambda a: costs[a]), max(costs, key=lambda a: costs[a])
    return (
        f"To reach {reached}, the highest accuracy that every arm has seen, {cheap} took the least "
        f"({_cost(costs[cheap], spent)}) and {dear} the most ({_cost(costs[dear], spent)})."
    )


def _cost(value: float, spent: Spent) -> str:
    return amount(Stat(value, None), spent.unit)


def _caption_loss(curves: Sequence[tuple[Arm, Curve]]) -> str:
    ends = {arm.label: float(curve.mean[-1]) for arm, curve in curves}
    finite = {label: end for label, end in ends.items() if np.isfinite(end)}
    lost = [label for label in ends if label not in finite]
    text = "Loss on the test set at each evaluation"
    if len(ends) > 1 and finite:
        best = min(finite, key=lambda a: finite[a])
        text += f": {best} ends lowest with {finite[best]:.3g}"
    elif finite:
        text += f", {next(iter(finite.values())):.3g} at the end"
    return f"{text}; {listed(lost)} diverged (no finite loss at the end)." if lost else f"{text}."

"""Figures of sizes: the memory of a device, the layers of a network, the samples of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from foreseed.report.arms import Arm, Stat
from foreseed.report.canvas import Drawing, publish, sheet, short, table_text
from foreseed.report.colours import LIGHT, method_colour
from foreseed.report.words import amount, listed, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Bar = tuple[str, str, Stat | None]
"""Name, colour and length; a length of None was not measured."""

MEMORY = {
    "planned": "memory.planned_bytes",
    "observed by the engine": "memory.observed_bytes",
    "whole process": "memory.process_peak_bytes",
}

_NUMBERED_DEVICES = 40
"""Up to so many devices stand in the order of their numbers; more are sorted."""


def memory(arms: Sequence[Arm], folder: Path) -> Drawing:
    """Peak memory of a device: what the plan says, what the engine saw, what the process took."""
    found = {kind: [arm.numbers.get(path) for arm in arms] for kind, path in MEMORY.items()}
    measured = {kind: stats for kind, stats in found.items() if any(stats)}
    if len(arms) == 1:
        # One arm's three figures share a scale, as there is nothing else to compare them with.
        colour = method_colour(arms[0].first.method)
        panels: dict[str, list[_Bar]] = {"": [(kind, colour, stats[0]) for kind, stats in measured.items()]}
    else:
        panels = {
            kind: [
                (fill(short(a.label), 22, break_on_hyphens=False), method_colour(a.first.method), s)
                for a, s in zip(arms, stats, strict=True)
            ]
            for kind, stats in measured.items()
        }
    row = 0.38 if any("\n" in name for bars in panels.values() for name, _, _ in bars) else 0.26
    heights = [0.55 + row * len(bars) for bars in panels.values()]
    figure = sheet(sum(heights) + 0.3)
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (title, bars) in zip(grid, panels.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
        _draw_bars(axes, bars)
    grid[-1].set_xlabel("peak memory of one device (bytes)")
    rows = [
        [arm.label, arm.first.method, kind, *_pair(stat)]
        for kind, stats in measured.items()
        for arm, stat in zip(arms, stats, strict=True)
        if stat is not None
    ]
    numbers = table_text(["arm", "method", "kind", "bytes", "bytes_std"], rows)
    svg = publish(figure, folder, "memory", numbers)
    return Drawing("memory", "device", "Peak memory of a device", _caption_memory(arms, found["planned"]), svg, numbers)


def _caption_memory(arms: Sequence[Arm], planned: Sequence[Stat | None]) -> str:
    needs = {arm.label: stat.mean for arm, stat in zip(arms, planned, strict=True) if stat is not None}
    least, most = min(needs, key=lambda a: needs[a]), max(needs, key=lambda a: needs[a])
    if needs[least] == needs[most]:
        return f"A device is planned to need {amount(Stat(needs[least], None), 'B')} at its peak."
    return (
        f"A device of {least} is planned to need {amount(Stat(needs[least], None), 'B')} at its peak, "
        f"one of {most} {needs[most] / needs[least]:,.1f} times as much."
    )


def _draw_bars(axes: Axes, bars: Sequence[_Bar]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    longest = max(stat.mean for _, _, stat in bars if stat is not None)
    for i, (_, colour, stat) in enumerate(bars):
        if stat is None:
            axes.text(0.01 * longest, i, "not measured", va="center", color=LIGHT["muted"], fontsize=8.5)
            continue
        axes.barh(i, stat.mean, color=colour, height=0.62)
        axes.text(stat.mean + 0.012 * longest, i, amount(stat, "B"), va="center", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.3 * longest)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.tick_params(axis="y", length=0)


@dataclass(frozen=True)
class _LayerRow:
    """A layer over the seeds of an arm."""

    name: str
    kind: str
    weights: int
    density: Stat
    flops: Stat
    dense_flops: float


def layers(arms: Sequence[Arm], folder: Path) -> list[Drawing]:
    """For each mask, the density and the work of every layer; a dense arm only where no pruned arm shows its model."""
    pruned = [arm for arm in arms if arm.pruned]
    dense = [arm for arm in arms if not arm.pruned]
    models = {arm.first.model: arm for arm in (*reversed(dense), *pruned)}
    shown: dict[tuple[object, ...], list[Arm]] = {}
    for arm in (*pruned, *(arm for arm in models.values() if not arm.pruned)):
        if not _layer_rows(arm):
            continue
        shown.setdefault(tuple(run.summary.layers for run in arm.runs), []).append(arm)
    return [
        _layers(same, dense if i == 1 and pruned else [], folder, f"layers-{i}")
        for i, same in enumerate(shown.values(), 1)
    ]


def _layers(same: Sequence[Arm], dense: Sequence[Arm], folder: Path, name: str) -> Drawing:
    rows, pruned = _layer_rows(same[0]), same[0].pruned
    methods = {arm.first.method for arm in same}
    colour = method_colour(methods.pop()) if len(methods) == 1 else LIGHT["plain"]
    figure = sheet(0.95 + 0.21 * len(rows))
    panels = figure.subplots(1, 2 if pruned else 1, sharey=True, squeeze=False)[0]
    if pruned:
        _draw_density(panels[0], [100 * row.density.mean for row in rows], colour)
    _draw_work(panels[-1], [row.flops.mean for row in rows], [row.dense_flops for row in rows], colour, pruned)
    panels[0].set_yticks(range(len(rows)), [short(row.name, 24) for row in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    numbers = table_text(
        ["arm", "layer", "kind", "weights", "density", "density_std", "flops", "flops_std", "dense_flops"],
        [
            [arm.label, row.name, row.kind, row.weights, *_pair(row.density), *_pair(row.flops), row.dense_flops]
            for arm in same
            for row in rows
        ],
    )
    svg = publish(figure, folder, name, numbers)
    title = f"Layers of {listed([arm.label for arm in same])}"
    return Drawing(name, "device", title, _caption_layers(rows, pruned, dense), svg, numbers)


def _layer_rows(arm: Arm) -> list[_LayerRow]:
    """The layers that hold weights."""
    rows = []
    for seeds in zip(*(run.summary.layers for run in arm.runs), strict=True):
        density = [layer.density for layer in seeds if layer.density is not None]
        if seeds[0].n_dense and density:
            flops = Stat.of(2 * layer.macs for layer in seeds)
            first = seeds[0]
            rows.append(_LayerRow(first.name, first.kind, first.n_dense, Stat.of(density), flops, 2 * first.dense_macs))
    return rows


def _pair(stat: Stat) -> tuple[float, float | str]:
    return stat.mean, "" if stat.std is None else stat.std


def _caption_layers(rows: Sequence[_LayerRow], pruned: bool, dense: Sequence[Arm]) -> str:
    work = amount(Stat(fsum(row.flops.mean for row in rows), None), "FLOP")
    if not pruned:
        return f"One image takes {work} through the dense network."
    lightest = min(rows, key=lambda row: row.density.mean)
    whole = amount(Stat(fsum(row.dense_flops for row in rows), None), "FLOP")
    keep = "keeps" if len(dense) == 1 else "keep"
    rest = f"; {listed([arm.label for arm in dense])} {keep} every weight" if dense else ""
    return (
        f"Pruning was hardest on {lightest.name}, which keeps {percent(Stat(lightest.density.mean, None))} of its "
        f"weights, and one image takes {work} instead of {whole} (grey bars){rest}."
    )


def _draw_density(axes: Axes, values: Sequence[float], colour: str) -> None:
    at = np.arange(len(values))
    axes.barh(at, [100] * len(values), color=LIGHT["track"], height=0.66)
    axes.barh(at, values, color=colour, height=0.66)
    for i, value in enumerate(values):
        axes.text(102, i, f"{value:.1f}", va="center", fontsize=7.5)
    axes.set_xlim(0, 122)
    axes.set_xticks([0, 50, 100])
    axes.set_xlabel("weights kept (%)")
    axes.tick_params(axis="y", length=0)


def _draw_work(axes: Axes, live: Sequence[float], full: Sequence[float], colour: str, pruned: bool) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    at = np.arange(len(live))
    if pruned:
        axes.barh(at, full, color=LIGHT["track"], height=0.66)
    axes.barh(at, live, color=colour, height=0.66)
    axes.set_xlim(0, 1.05 * max(*full, *live, 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("FLOPs of an image")
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")


def sizes(values: Sequence[int], folder: Path, name: str) -> tuple[str, str]:
    """Draw how many samples each device holds; returns the texts of the SVG and the CSV."""
    from matplotlib.ticker import MaxNLocator

    numbered = len(values) <= _NUMBERED_DEVICES
    drawn = np.array(values if numbered else sorted(values, reverse=True), float)
    figure = sheet(2.3)
    axes = figure.subplots()
    axes.stairs(drawn, np.arange(len(drawn) + 1) - 0.5, fill=True, color=LIGHT["plain"])
    if numbered:
        axes.vlines(np.arange(len(drawn) + 1) - 0.5, 0, drawn.max(), color=LIGHT["paper"], lw=2)
    axes.set_xlim(-0.5, len(drawn) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples")
    axes.set_xlabel("device" if numbered else "devices, largest first")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    numbers = table_text(["device", "samples"], enumerate(values))
    return publish(figure, folder, name, numbers), numbers

"""The arms in numbers: rows for machines, a table for the terminal, and the page's table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foreseed.report.arms import Arm, Stat, group
from foreseed.report.colours import method_colour
from foreseed.report.read import read_runs
from foreseed.report.words import amount, count, duration, percent

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SummaryRow:
    """An arm's results; each number is a mean over its seeds, with the standard deviation if there are several.

    Accuracies and densities are fractions; costs are of all devices over the whole run; memory is of one device.
    """

    arm: str
    method: str
    engine: str
    model: str
    data: str
    seeds: tuple[int, ...]
    rounds: Stat
    n_live: Stat
    n_total: Stat
    density: Stat
    macs: Stat
    dense_macs: Stat
    final_accuracy: Stat
    max_accuracy: Stat
    last_mean_accuracy: Stat
    final_ema_accuracy: Stat | None
    flops: Stat
    dense_flops: Stat
    forward_passes: Stat
    bytes_up: Stat
    bytes_down: Stat
    device_round_flops: Stat
    device_round_bytes_up: Stat
    device_round_bytes_down: Stat
    planned_bytes: Stat
    observed_bytes: Stat | None
    process_peak_bytes: Stat | None
    seconds: Stat
    wire_up_bytes: Stat | None
    wire_down_bytes: Stat | None
    device_peak_bytes: Stat | None
    round_overhead_seconds: Stat | None


def summary_table(runs: Sequence[str | os.PathLike[str]]) -> list[SummaryRow]:
    """One row for each arm of the given run folders; runs that differ in their seed alone are one arm."""
    return [summary_row(arm) for arm in group(read_runs(runs))]


def summary_row(arm: Arm) -> SummaryRow:
    """The row of one arm."""
    return SummaryRow(
        arm=arm.label,
        method=arm.first.method,
        engine=arm.first.engine,
        model=arm.first.model,
        data=arm.first.data,
        seeds=arm.seeds,
        rounds=arm.stat(lambda s: s.rounds),
        n_live=arm.stat(lambda s: s.n_live),
        n_total=arm.stat(lambda s: s.n_total),
        density=arm.stat(lambda s: s.density),
        macs=arm.stat(lambda s: s.macs),
        dense_macs=arm.stat(lambda s: s.dense_macs),
        final_accuracy=arm.stat(lambda s: s.final_accuracy),
        max_accuracy=arm.stat(lambda s: s.max_accuracy),
        last_mean_accuracy=arm.stat(lambda s: s.last_mean_accuracy),
        final_ema_accuracy=arm.maybe(lambda s: s.final_ema_accuracy),
        flops=arm.stat(lambda s: s.total.flops),
        dense_flops=arm.stat(lambda s: s.total.dense_flops),
        forward_passes=arm.stat(lambda s: s.total.forward_passes),
        bytes_up=arm.stat(lambda s: s.total.bytes_up),
        bytes_down=arm.stat(lambda s: s.total.bytes_down),
        device_round_flops=arm.stat(lambda s: s.per_device_round.flops),
        device_round_bytes_up=arm.stat(lambda s: s.per_device_round.bytes_up),
        device_round_bytes_down=arm.stat(lambda s: s.per_device_round.bytes_down),
        planned_bytes=arm.stat(lambda s: s.memory.planned_bytes),
        observed_bytes=arm.maybe(lambda s: s.memory.observed_bytes),
        process_peak_bytes=arm.maybe(lambda s: s.memory.process_peak_bytes),
        seconds=arm.stat(lambda s: s.total.seconds),
        wire_up_bytes=arm.maybe(lambda s: None if s.fleet is None else s.fleet.wire_up_bytes),
        wire_down_bytes=arm.maybe(lambda s: None if s.fleet is None else s.fleet.wire_down_bytes),
        device_peak_bytes=arm.maybe(lambda s: None if s.fleet is None else 1e6 * s.fleet.device_peak_mb),
        round_overhead_seconds=arm.maybe(lambda s: None if s.fleet is None else s.fleet.round_overhead_ms / 1000),
    )


def console_table(runs: Sequence[str | os.PathLike[str]]) -> Table:
    """The arms of the given run folders as a table for the terminal: what was reached, and what it cost."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = summary_table(runs)
    spread = " (mean ± standard deviation over seeds)" if any(len(row.seeds) > 1 for row in rows) else ""
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", padding=(0, 1, 0, 0), leading=1)
    table.caption = f"Test accuracy{spread}; FLOPs and bytes of all devices; planned memory of one device."
    table.add_column("arm\nengine, density", overflow="fold")
    for header in ("last round\nmean of last 5", "FLOPs\ndense", "bytes up\nbytes down", "memory", "time"):
        table.add_column(header, justify="right", no_wrap=True)
    best = max(row.final_accuracy.mean for row in rows) if len(rows) > 1 else None
    for row in rows:
        name = Text(row.arm, style=f"bold {method_colour(row.method)}")
        accuracy = Text(percent(row.final_accuracy), style="bold" if row.final_accuracy.mean == best else "")
        accuracy.append(f"\n{percent(row.last_mean_accuracy)}", style="not bold")
        if row.final_ema_accuracy is not None:
            accuracy.append(f"\nEMA {percent(row.final_ema_accuracy)}", style="not bold")
        table.add_row(
            name.append(f"\n{row.engine}, {percent(_mean(row.density))}", style="not bold dim default"),
            accuracy,
            f"{amount(_mean(row.flops))}\n{amount(_mean(row.dense_flops))}",
            f"{_bytes(_mean(row.bytes_up))}\n{_bytes(_mean(row.bytes_down))}",
            _bytes(_mean(row.planned_bytes)),
            duration(_mean(row.seconds)),
        )
    return table


def _mean(stat: Stat) -> Stat:
    """A terminal has room for the spread of the accuracies only."""
    return Stat(stat.mean, None)


@dataclass(frozen=True)
class Cell:
    """A number of one arm; `dense` is the same had nothing been pruned, `best` marks the best of several arms."""

    text: str
    dense: str = ""
    best: bool = False


@dataclass(frozen=True)
class Line:
    """One quantity in words, for every arm: a line of the page's table."""

    label: str
    value: Callable[[SummaryRow], Stat | None]
    show: Callable[[Stat | None], str]
    better: Literal["higher", "lower", ""] = ""
    dense: Callable[[SummaryRow], Stat] | None = None
    optional: bool = False

    def cells(self, rows: Sequence[SummaryRow]) -> list[Cell] | None:
        """The cells of all arms; None for an optional line that no arm has a number for."""
        values = [self.value(row) for row in rows]
        means = [v.mean for v in values if v is not None]
        if self.optional and not means:
            return None
        marked = bool(self.better) and len(means) > 1 and min(means) < max(means)
        best = (max if self.better == "higher" else min)(means, default=0.0)
        return [
            Cell(
                self.show(v),
                self.show(self.dense(row)) if self.dense else "",
                marked and v is not None and v.mean == best,
            )
            for row, v in zip(rows, values, strict=True)
        ]


@dataclass(frozen=True)
class WordLine:
    """A line of words instead of numbers."""

    label: str
    word: Callable[[SummaryRow], str]

    def cells(self, rows: Sequence[SummaryRow]) -> list[Cell]:
        """The words of all arms."""
        return [Cell(self.word(row)) for row in rows]


def _flop(stat: Stat | None) -> str:
    return amount(stat, "FLOP")


def _bytes(stat: Stat | None) -> str:
    return amount(stat, "B")


PARTS: dict[str, tuple[Line | WordLine, ...]] = {
    "Test accuracy": (
        Line("after the last round", lambda r: r.final_accuracy, percent, "higher"),
        Line("mean of the last 5 evaluations", lambda r: r.last_mean_accuracy, percent, "higher"),
        Line("highest of all evaluations", lambda r: r.max_accuracy, percent, "higher"),
        Line("of the averaged weights (EMA)", lambda r: r.final_ema_accuracy, percent, "higher", optional=True),
    ),
    "Method and model": (
        WordLine("method", lambda r: r.method),
        WordLine("engine", lambda r: r.engine),
        Line("density", lambda r: r.density, percent),
        Line("trainable numbers", lambda r: r.n_live, count, dense=lambda r: r.n_total),
        Line("multiply-adds of a forward pass", lambda r: r.macs, amount, "lower", lambda r: r.dense_macs),
    ),
    "All devices, whole run": (
        Line("rounds", lambda r: r.rounds, count),
        Line("FLOPs", lambda r: r.flops, _flop, "lower", lambda r: r.dense_flops),
        Line("forward passes of an image", lambda r: r.forward_passes, amount, "lower"),
        Line("bytes up", lambda r: r.bytes_up, _bytes, "lower"),
        Line("bytes down", lambda r: r.bytes_down, _bytes, "lower"),
        Line("time of the rounds", lambda r: r.seconds, duration),
    ),
    "One device, one round": (
        Line("FLOPs", lambda r: r.device_round_flops, _flop, "lower"),
        Line("bytes up", lambda r: r.device_round_bytes_up, _bytes, "lower"),
        Line("bytes down", lambda r: r.device_round_bytes_down, _bytes, "lower"),
    ),
    "Peak memory of a device": (
        Line("planned", lambda r: r.planned_bytes, _bytes, "lower"),
        Line("observed by the engine", lambda r: r.observed_bytes, _bytes, "lower"),
        Line("whole process, without a network", lambda r: r.process_peak_bytes, _bytes, "lower"),
    ),
    "Real devices": (
        Line(
            "bytes up on the wire, framing and TLS included", lambda r: r.wire_up_bytes, _bytes, "lower", optional=True
        ),
        Line("bytes down on the wire", lambda r: r.wire_down_bytes, _bytes, "lower", optional=True),
        Line("largest device process", lambda r: r.device_peak_bytes, _bytes, "lower", optional=True),
        Line("a round beyond its computing", lambda r: r.round_overhead_seconds, duration, "lower", optional=True),
    ),
}
"""The page's table, part by part."""

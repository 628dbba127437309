"""The arms in numbers: rows for machines, a table for the terminal, and the page's table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foreseed.report.arms import Arm, Stat, group
from foreseed.report.colours import method_colour
from foreseed.report.read import read_runs
from foreseed.report.words import amount, count, duration, percent, ratio

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SummaryRow:
    """An arm's results: every number of its summaries by its dotted path, such as `total.flops`.

    A number is a mean over the seeds that have it, with the standard deviation if there are several. Accuracies and
    densities are fractions; `total` is of all devices over the whole run; memory is of one device.
    """

    arm: str
    method: str
    engine: str
    model: str
    data: str
    seeds: tuple[int, ...]
    numbers: dict[str, Stat]


def summary_table(runs: Sequence[str | os.PathLike[str]]) -> list[SummaryRow]:
    """One row for each arm of the given run folders; runs that differ in their seed alone are one arm."""
    return [summary_row(arm) for arm in group(read_runs(runs))]


def summary_row(arm: Arm) -> SummaryRow:
    """The row of one arm."""
    first = arm.first
    return SummaryRow(arm.label, first.method, first.engine, first.model, first.data, arm.seeds, arm.numbers)


_UNITS: dict[str, Callable[[Stat | None], str]] = {
    "accuracy": percent,
    "density": percent,
    "remembered": percent,
    "snr": ratio,
    "flops": lambda stat: amount(stat, "FLOP"),
    "bytes": lambda stat: amount(stat, "B"),
    "mb": lambda stat: amount(_times(stat, 1e6), "B"),
    "seconds": duration,
    "ms": lambda stat: duration(_times(stat, 1e-3)),
    "n": count,
    "rounds": count,
}
"""How a number is written, by a word of its name."""


def shown(path: str, numbers: Mapping[str, Stat]) -> str:
    """The number at a path in words, by the unit that its name tells; a dash where there is none."""
    words = path.rpartition(".")[2].split("_")
    return next((write for word, write in _UNITS.items() if word in words), amount)(numbers.get(path))


def _times(stat: Stat | None, factor: float) -> Stat | None:
    return None if stat is None else Stat(stat.mean * factor, None if stat.std is None else stat.std * factor)


def console_table(runs: Sequence[str | os.PathLike[str]]) -> Table:
    """The arms of the given run folders as a table for the terminal: what was reached, and what it cost."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = summary_table(runs)
    spread = " (mean ± standard deviation over seeds)" if any(len(row.seeds) > 1 for row in rows) else ""
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", padding=(0, 1, 0, 0), leading=1)
    table.caption = (
        f"Test accuracy{spread}; FLOPs and bytes of all devices; planned memory of one, and for how many images."
    )
    table.add_column("arm\nengine, density", overflow="fold")
    for header in ("last round\nmean of last 5", "FLOPs\ndense", "bytes up\nbytes down", "memory\nimages", "time"):
        table.add_column(header, justify="right", no_wrap=True)
    best = max(row.numbers["final_accuracy"].mean for row in rows) if len(rows) > 1 else None
    for row in rows:
        # A terminal has room for the spread of the accuracies only.
        means = {path: Stat(stat.mean, None) for path, stat in row.numbers.items()}
        name = Text(row.arm, style=f"bold {method_colour(row.method)}")
        is_best = row.numbers["final_accuracy"].mean == best
        accuracy = Text(shown("final_accuracy", row.numbers), style="bold" if is_best else "")
        accuracy.append(f"\n{shown('last_mean_accuracy', row.numbers)}", style="not bold")
        if "final_ema_accuracy" in row.numbers:
            accuracy.append(f"\nEMA {shown('final_ema_accuracy', row.numbers)}", style="not bold")
        if "personal_accuracy" in row.numbers:
            accuracy.append(f"\nown {shown('personal_accuracy', row.numbers)}", style="not bold")
        table.add_row(
            name.append(f"\n{row.engine}, {shown('density', means)}", style="not bold dim default"),
            accuracy,
            f"{amount(means['total.flops'])}\n{amount(means['total.dense_flops'])}",
            f"{shown('total.bytes_up', means)}\n{shown('total.bytes_down', means)}",
            f"{shown('memory.planned_bytes', means)}\n{shown('memory.batch', means)}",
            shown("total.seconds", means),
        )
    return table


@dataclass(frozen=True)
class Cell:
    """A number of one arm; `dense` is the same had nothing been pruned, `best` marks the best of several arms."""

    text: str
    dense: str = ""
    best: bool = False


@dataclass(frozen=True)
class Line:
    """The number at a path, for every arm: a line of the page's table."""

    label: str
    path: str
    better: Literal["higher", "lower", ""] = ""
    dense: str = ""
    """The path of the same number had nothing been pruned."""

    def cells(self, rows: Sequence[SummaryRow]) -> list[Cell]:
        """The cells of all arms; none if no arm has the number."""
        means = [row.numbers[self.path].mean if self.path in row.numbers else None for row in rows]
        there = [mean for mean in means if mean is not None]
        marked = bool(self.better) and len(there) > 1 and min(there) < max(there)
        best = (max if self.better == "higher" else min)(there, default=None)
        return [
            Cell(
                shown(self.path, row.numbers),
                shown(self.dense, row.numbers) if self.dense else "",
                marked and mean == best,
            )
            for row, mean in zip(rows, means, strict=True)
            if there
        ]


_PARTS: dict[str, tuple[Line, ...]] = {
    "Test accuracy": (
        Line("after the last round", "final_accuracy", "higher"),
        Line("mean of the last 5 evaluations", "last_mean_accuracy", "higher"),
        Line("highest of all evaluations", "max_accuracy", "higher"),
        Line("of the averaged weights (EMA)", "final_ema_accuracy", "higher"),
        Line("of devices' own models, each on its own images", "personal_accuracy", "higher"),
    ),
    "Method and model": (
        Line("density", "density"),
        Line("density of devices' own models", "personal_density"),
        Line("trainable numbers", "n_live", dense="n_total"),
        Line("multiply-adds of a forward pass", "macs", "lower", "dense_macs"),
    ),
    "All devices, whole run": (
        Line("rounds", "rounds"),
        Line("FLOPs", "total.flops", "lower", "total.dense_flops"),
        Line("forward passes of an image", "total.forward_passes", "lower"),
        Line("bytes up", "total.bytes_up", "lower"),
        Line("bytes down", "total.bytes_down", "lower"),
        Line("time of the rounds", "total.seconds"),
    ),
    "One device, one round": (
        Line("FLOPs", "per_device_round.flops", "lower", "per_device_round.dense_flops"),
        Line("forward passes of an image", "per_device_round.forward_passes", "lower"),
        Line("bytes up", "per_device_round.bytes_up", "lower"),
        Line("bytes down", "per_device_round.bytes_down", "lower"),
    ),
    "Estimates, last quarter of the rounds": (
        Line("signal to noise of a round", "estimates.snr", "higher"),
        Line("of what the server remembers, counted", "estimates.remembered"),
    ),
    "Peak memory of a device": (
        Line("planned", "memory.planned_bytes", "lower"),
        Line("observed by the engine", "memory.observed_bytes", "lower"),
        Line("whole process, without a network", "memory.process_peak_bytes", "lower"),
    ),
    "Real devices": (
        Line("bytes up on the wire, framing and TLS included", "fleet.wire_up_bytes", "lower"),
        Line("bytes down on the wire", "fleet.wire_down_bytes", "lower"),
        Line("largest device process", "fleet.device_peak_mb", "lower"),
        Line("a round beyond its computing", "fleet.round_overhead_ms", "lower"),
    ),
}
"""The page's table, part by part, in words."""

_ELSEWHERE = ("pruning.", "partition.", "memory.batch", "fleet.devices", "fleet.payload")
"""Numbers that the page tells in other places, or that repeat others."""


def parts(rows: Sequence[SummaryRow]) -> list[tuple[str, list[tuple[str, list[Cell]]]]]:
    """The page's table: the lines that arms have numbers for, and last the numbers that no words were found for yet."""
    told = {path for lines in _PARTS.values() for line in lines for path in (line.path, line.dense)}
    paths = dict.fromkeys(path for row in rows for path in row.numbers)
    others = (Line(path, path) for path in paths if path not in told and not path.startswith(_ELSEWHERE))
    words = [(key, [Cell(getattr(row, key)) for row in rows]) for key in ("method", "engine")]
    table = {
        title: [(line.label, cells) for line in lines if (cells := line.cells(rows))]
        for title, lines in (*_PARTS.items(), ("Other numbers", others))
    }
    table["Method and model"][:0] = words
    return [(title, lines) for title, lines in table.items() if lines]

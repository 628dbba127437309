"""Runs that differ in their seed alone are one arm: its means, its spread, and a name that tells it from the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, sqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from foreseed.runs import Run, Summary
from foreseed.runs.records import Record

Array = npt.NDArray[np.float64]

Quantity = Literal["accuracy", "loss", "ema_accuracy"]

_NOT_A_SETTING = {"name", "seed", "workers"}
"""Keys that leave an arm what it is."""


@dataclass(frozen=True)
class Stat:
    """A mean over seeds with its sample standard deviation, which one seed alone does not have."""

    mean: float
    std: float | None

    @staticmethod
    def of(values: Iterable[float]) -> Stat:
        """Mean and standard deviation of at least one number."""
        numbers = list(values)
        # fsum gives the same bits with every Python and NumPy, and in whatever order the seeds come.
        mean = fsum(numbers) / len(numbers)
        if len(numbers) == 1:
            return Stat(mean, None)
        return Stat(mean, sqrt(fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)))


@dataclass(frozen=True)
class Curve:
    """A quantity over the evaluated rounds: mean and spread over seeds, with the mean cost up to each round."""

    rounds: Array
    flops: Array
    bytes: Array
    mean: Array
    std: Array | None


@dataclass(frozen=True)
class Arm:
    """The runs of one configuration, one for each seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Summary:
        """The results of the first seed, for all that seeds share."""
        return self.runs[0].summary

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.summary.seed for run in self.runs)

    @property
    def pruned(self) -> bool:
        return self.first.n_live < self.first.n_total

    @cached_property
    def numbers(self) -> dict[str, Stat]:
        """Every number of the summaries by its dotted path, such as `total.flops`, over the runs that have it."""
        found: dict[str, list[float]] = {}
        for run in self.runs:
            for path, value in flat(run.summary, Record):
                if isinstance(value, int | float) and not isinstance(value, bool) and path != "seed":
                    found.setdefault(path, []).append(value)
        return {path: Stat.of(values) for path, values in found.items()}

    def curve(self, quantity: Quantity) -> Curve | None:
        """A quantity at the rounds that every seed evaluated; None if there is no such round."""
        return self.curve_of(lambda run: [getattr(row, quantity) for row in run.rounds])

    def curve_of(self, quantity: Callable[[Run], Sequence[float | None]]) -> Curve | None:
        """What a function makes of a run, round by round, where every seed has it; None if there is no such round."""
        found = [quantity(run) for run in self.runs]
        known = [
            {row.round: i for i, row in enumerate(run.rounds) if its[i] is not None}
            for run, its in zip(self.runs, found, strict=True)
        ]
        shared = sorted(set.intersection(*(set(rows) for rows in known)))
        if not shared:
            return None
        rows = [[at[r] for r in shared] for at in known]
        values = np.array([[its[i] for i in row] for its, row in zip(found, rows, strict=True)], float)
        return Curve(
            rounds=np.array(shared, float),
            flops=np.mean([run.flops_so_far[row] for run, row in zip(self.runs, rows, strict=True)], axis=0),
            bytes=np.mean([run.bytes_so_far[row] for run, row in zip(self.runs, rows, strict=True)], axis=0),
            mean=values.mean(axis=0),
            std=values.std(axis=0, ddof=1) if len(self.runs) > 1 else None,
        )


def group(runs: Sequence[Run]) -> list[Arm]:
    """Gather runs into arms, in the order in which the arms first come.

    Two runs are seeds of one arm if their names (without a suffix such as `-seed3`) and all their settings but the
    seed are equal. The same seed twice is not a second sample, so it makes an arm of its own.
    """
    groups: list[list[Run]] = []
    for run in runs:
        for members in groups:
            if _kind(run) == _kind(members[0]) and run.summary.seed not in {m.summary.seed for m in members}:
                members.append(run)
                break
        else:
            groups.append([run])
    for members in groups:
        members.sort(key=lambda run: run.summary.seed)
    labels = _labels([members[0] for members in groups])
    return [Arm(label, tuple(members)) for label, members in zip(labels, groups, strict=True)]


def base_name(summary: Summary) -> str:
    """A run's name without the suffix that tells its seed."""
    return re.sub(rf"[-_. /]s(eed)?[-_=]?{summary.seed}$", "", summary.name) or summary.name


def settings(run: Run) -> dict[str, Any]:
    """A run's settings by their dotted keys, without those that leave an arm what it is."""
    return {key: value for key, value in flat(run.config) if key not in _NOT_A_SETTING}


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys of the settings in which runs differ, in the order of their files."""
    found = [settings(run) for run in runs]
    keys = dict.fromkeys(key for values in found for key in values)
    return [key for key in keys if any(values.get(key) != found[0].get(key) for values in found)]


def _kind(run: Run) -> tuple[str, str, dict[str, Any]]:
    return base_name(run.summary), run.summary.engine, settings(run)


def flat(table: Iterable[Any], kind: type[Iterable[Any]] = dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table, and of all tables of its kind inside it, by their dotted keys."""
    for key, value in dict(table).items():
        if isinstance(value, kind):
            yield from flat(value, kind, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _labels(runs: Sequence[Run]) -> list[str]:
    """Names of arms; equal names are told apart by the settings that differ, or else by their folders or numbers."""
    names = [base_name(run.summary) for run in runs]
    labels = []
    for run, name in zip(runs, names, strict=True):
        keys = differing([other for other, its in zip(runs, names, strict=True) if its == name])
        told = ", ".join(_said(key, settings(run).get(key)) for key in keys)
        labels.append(
            name if names.count(name) == 1 else f"{name} ({told if 0 < len(keys) <= 2 else run.folder.resolve().name})"
        )
    return [
        f"{label} #{labels[: i + 1].count(label)}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def _said(key: str, value: Any) -> str:
    # A word such as `random` speaks for itself, a number does not.
    return value if isinstance(value, str) else f"{key.rpartition('.')[2]} {value}"

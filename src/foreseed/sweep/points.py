"""The settings of a sweep: every combination of some values, or draws from ranges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path

from foreseed.config import Config, ConfigError, fingerprint, load
from foreseed.draws import Draws

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")


@dataclass(frozen=True)
class Range:
    """All numbers from one to another; of whole numbers whole ones."""

    low: float
    high: float
    whole: bool

    def at(self, share: float) -> str:
        """The value at a share of the way: by factors if both ends are above 0, as rates and counts are tried."""
        if self.low > 0:
            value = exp(log(self.low) + share * (log(self.high) - log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return str(round(value)) if self.whole else f"{value:.3g}"


Axis = tuple[str, ...] | Range


@dataclass(frozen=True)
class Point:
    """One setting of a sweep, and the run that it asks for."""

    settings: Mapping[str, str]
    """The values that the sweep gave, by dotted key, as they were written."""
    config: Config

    @property
    def named(self) -> Config:
        """Its run: by the name of its settings, on one core, since others run beside it."""
        values = [f"{key.rpartition('.')[2]}-{value}" for key, value in self.settings.items()]
        told = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(values)).lstrip(".-")[:80]
        return self.config.with_({"name": f"{told}-s{self.config.seed}", "workers": 1})

    @property
    def folder(self) -> str:
        """Of its run: with the fingerprint of all that shapes it, so that another experiment's is not taken for it."""
        return f"{self.named.name}-{fingerprint(self.config)[:8]}"


def parse_axes(words: Sequence[str]) -> tuple[dict[str, Axis], list[str]]:
    """The axes of a sweep (`train.lr=0.01,0.02`, `train.k=50..500`), and the plain overrides beside them."""
    axes: dict[str, Axis] = {}
    plain = []
    for word in words:
        key, _, text = word.partition("=")
        values = tuple(value.strip() for value in text.split(","))
        found = _RANGE.fullmatch(text.strip())
        if found:
            low, high = (float(end) for end in found.groups())
            if not low < high:
                raise ConfigError(f"{word}: expected a range from a lower to a higher number, such as 0.001..0.1")
            axes[key] = Range(low, high, whole=all(re.fullmatch(r"[-+]?\d+", end) for end in found.groups()))
        elif len(values) > 1:
            if "" in values or len(set(values)) < len(values):
                raise ConfigError(f"{word}: expected values that differ, with a comma between each two")
            axes[key] = values
        else:
            plain.append(word)
    return axes, plain


def make_points(
    file: Path | None, axes: Mapping[str, Axis], plain: Sequence[str], seeds: Sequence[int] = (), random: int = 0
) -> list[Point]:
    """Every combination of the axes' values, or so many random ones, each with every seed; all are checked here."""
    if not axes:
        raise ConfigError("nothing to sweep over; give some key several values, such as train.lr=0.01,0.02,0.05")
    ranges = [key for key, axis in axes.items() if isinstance(axis, Range)]
    if ranges and not random:
        raise ConfigError(f"{ranges[0]} is a range; say how many points of it to draw, such as --random 20")
    chosen = _drawn(axes, random) if random else _grid(axes)
    of_seeds = [[f"seed={seed}"] for seed in seeds] or [[]]
    found = [
        Point(settings, load(file, [*plain, *(f"{key}={value}" for key, value in settings.items()), *of_seed]))
        for settings in chosen
        for of_seed in of_seeds
    ]
    return list({point.folder: point for point in found}.values())


def _grid(axes: Mapping[str, Axis]) -> list[dict[str, str]]:
    lists = [axis for axis in axes.values() if not isinstance(axis, Range)]
    return [dict(zip(axes, values, strict=True)) for values in product(*lists)]


def _drawn(axes: Mapping[str, Axis], count: int) -> list[dict[str, str]]:
    """The same for the same sweep, so that one that was stopped goes on with its own points."""
    drawn = []
    for i in range(count):
        shares = Draws(i, "sweep", *axes).uniforms(len(axes))
        drawn.append({key: _picked(axis, share) for (key, axis), share in zip(axes.items(), shares, strict=True)})
    return drawn


def _picked(axis: Axis, share: float) -> str:
    return axis.at(share) if isinstance(axis, Range) else axis[int(share * len(axis))]

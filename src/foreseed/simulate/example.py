"""A served run as the example of a simulated one: who answered when, and which images each of them held.

A device that asked for no number got the next free one, whatever its shard. Directions follow from the number, images
from the shard, so a simulation needs to know both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from foreseed.config import Config, differences
from foreseed.config import load as load_config
from foreseed.runs import Row, RunError, changes_of, rows_so_far
from foreseed.runs.status import read_status, was_served

_MAY_DIFFER = {"rounds", "eval_every", "data.set", "data.root"}
"""A server needs no training images, so its data may lie elsewhere; images that are others show in the loss."""
_ROUNDING = 1e-4
"""By which losses may differ on machines that round otherwise; other images make more of a difference."""


@dataclass(frozen=True)
class Example:
    """A run to go through again."""

    folder: Path
    rows: Sequence[Row]
    names: Mapping[int, str]
    """Of the devices, by number; empty if they were simulated."""

    @property
    def participants(self) -> list[tuple[int, ...]]:
        """The devices that answered in each round."""
        return [row.participants for row in self.rows]

    def holders(self, sizes: Sequence[int]) -> list[int]:
        """For each device of the run, the device here that holds its images; `sizes` are how many each holds here.

        A name that ends in a number is taken for that of its shard (device-3), if the counts agree; or devices have
        the numbers of their shards; or every count is the count of one device only.
        """
        had = self._counts()
        if max(had, default=0) >= len(sizes):
            raise RunError(f"{self.folder}: it has a device {max(had)}, this experiment {len(sizes)}; set data.devices")
        for guess in (self._by_name(had, len(sizes)), {number: number for number in had}):
            if guess is not None and all(sizes[guess[number]] == count for number, count in had.items()):
                return _completed(guess, len(sizes))
        return _completed(self._by_count(had, sizes), len(sizes))

    def check(self, row: Row) -> None:
        """Refuse a round that is not the example's."""
        there = self.rows[row.round - 1]
        if row.samples != there.samples or not isclose(row.train_loss, there.train_loss, rel_tol=_ROUNDING):
            raise RunError(
                f"devices have {row.samples} images and a loss of {row.train_loss:.6g} here, {there.samples} and "
                f"{there.train_loss:.6g} in {self.folder}: they held other images there; give --like the experiment "
                "that the shards were made by, and devices their --number"
            )

    def _counts(self) -> dict[int, int]:
        """How many images each device said that it has."""
        counts: dict[int, int] = {}
        for row in self.rows:
            for number, count in zip(row.participants, row.sizes or (), strict=False):
                if counts.setdefault(number, count) != count:
                    raise RunError(
                        f"{self.folder}: {self._called(number)} had {counts[number]} images at first and {count} in "
                        f"round {row.round}; a simulated device keeps its images"
                    )
        return counts

    def _by_name(self, had: Mapping[int, int], devices: int) -> dict[int, int] | None:
        """By the numbers that names end in, if every name does, and each in one of its own."""
        ends = {number: re.search(r"\d{1,9}$", self.names.get(number, "")) for number in had}
        found = {number: int(end.group()) for number, end in ends.items() if end is not None}
        shards = {shard for shard in found.values() if shard < devices}
        return found if len(shards) == len(had) else None

    def _by_count(self, had: Mapping[int, int], sizes: Sequence[int]) -> dict[int, int]:
        guess = {}
        for number, count in had.items():
            here = [device for device, size in enumerate(sizes) if size == count]
            if not here:
                raise RunError(
                    f"{self.folder}: {self._called(number)} had {count} images, no device has as many here; give "
                    "--like the experiment that the shards were made by"
                )
            if len(here) > 1:
                raise RunError(
                    f"{self.folder}: {self._called(number)} had {count} images, as devices "
                    f"{' and '.join(map(str, here))} have here: which of them it was is not known; devices with a "
                    "--number, or a name that ends in it, can be told apart"
                )
            guess[number] = here[0]
        if len(set(guess.values())) < len(guess):
            raise RunError(
                f"{self.folder}: several of its devices had as many images as only one has here; give --like the "
                "experiment that the shards were made by"
            )
        return guess

    def _called(self, number: int) -> str:
        return f"device {number}" + (f" ({self.names[number]})" if number in self.names else "")


def read_example(folder: Path, config: Config) -> Example:
    """The run in a folder, as the example of an experiment."""
    if not (folder / "metrics.jsonl").exists():
        raise RunError(f"{folder}: expected the folder of a BP-free run, with its metrics.jsonl")
    rows = rows_so_far(folder)
    if len(rows) < config.rounds:
        raise RunError(f"{folder}: that run has {len(rows)} rounds, this one {config.rounds}; set rounds={len(rows)}")
    if changed := next((change for change in changes_of(folder) if change.settings), None):
        keys = ", ".join(changed.settings)
        raise RunError(f"{folder}: {keys} changed after round {changed.round} there, which no one experiment repeats")
    other = [key for key in differences(load_config(folder / "config.toml"), config) if key not in _MAY_DIFFER]
    if other:
        raise RunError(f"{folder}: that run has another config ({'; '.join(other)}); set the same here")
    names = {device.number: device.name for device in read_status(folder).devices} if was_served(folder) else {}
    return Example(folder, rows, names)


def _completed(guess: Mapping[int, int], devices: int) -> list[int]:
    """Those that never answered have what is left."""
    left = iter(sorted(set(range(devices)) - set(guess.values())))
    return [guess[number] if number in guess else next(left) for number in range(devices)]

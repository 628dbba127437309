"""What a user sees of a fleet at work: a live table of devices on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from foreseed.cli.progress import Watcher
from foreseed.config import Config
from foreseed.fleet.devices import Table as Devices
from foreseed.runs import Progress

_MOST = 30
"""Rows of the table; a larger fleet shows the devices that were heard of last."""


class DeviceTable:
    """Shows one served run: the line of its progress, and its devices below."""

    def __init__(self, console: Console, config: Config, quiet: bool = False) -> None:
        self._console, self._config = console, config
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal and not quiet else None
        self._lines = Watcher(console, quiet or self._live is not None)
        self._said = f"{config.run_name}: pruning"
        self._devices: Devices = {}

    def __enter__(self) -> DeviceTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.devices(self._devices)
            self._live.stop()

    def progress(self, progress: Progress) -> None:
        """A round is over."""
        accuracy = "" if progress.accuracy is None else f", accuracy {100 * progress.accuracy:.1f} %"
        self._said = f"{self._config.run_name}: {progress.stage} {progress.done}/{progress.total}{accuracy}"
        self._lines(progress)

    def say(self, line: str) -> None:
        """Something that the user should know."""
        self._console.print(line, soft_wrap=True)

    def devices(self, devices: Devices) -> None:
        """The fleet as it is now."""
        self._devices = devices
        if self._live is not None:
            self._live.update(Group(self._said, table(devices, time.monotonic())))


def table(devices: Devices, now: float) -> Table:
    """The devices, those heard of last if there are many, in the order of their numbers."""
    shown = Table("number", "device", "state", "round", "memory", "bytes up", "bytes down", "last seen")
    latest = sorted(devices.items(), key=lambda item: -(item[1].last_seen or 0))[:_MOST]
    for name, device in sorted(latest, key=lambda item: item[1].number):
        memory = f"{device.peak_kib * 1.024e-3:.1f} MB" if device.peak_kib else "-"
        shown.add_row(
            str(device.number), name, device.state, "-" if device.held < 0 else str(device.held), memory,
            f"{device.sent:,}", f"{device.received:,}",
            "-" if device.last_seen is None else f"{max(now - device.last_seen, 0):.0f} s ago",
        )  # fmt: skip
    if len(devices) > len(latest):
        shown.caption = f"and {len(devices) - len(latest)} more"
    return shown

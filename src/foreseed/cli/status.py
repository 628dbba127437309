"""How a fleet stands, for a reader: from the file that its server writes."""

from __future__ import annotations

import time
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from foreseed.runs.status import DeviceStatus, FleetStatus, read_status

_EVERY = 2.0
"""Seconds between looks; the server writes no more often."""
_LONG = 10.0
"""Seconds after which a status is said to be old."""


def shown(folder: Path) -> None:
    """Print a fleet's status once."""
    _console().print(_view(read_status(folder)), soft_wrap=True)


def show(folder: Path) -> None:
    """Show a fleet's status as it changes, until the server ends or the user does."""
    console, status = _console(), read_status(folder)
    if not console.is_terminal:
        console.print(_view(status), soft_wrap=True)
        while status.server == "running":
            time.sleep(_EVERY)
            status = read_status(folder)
            console.print(*_head(status), sep="\n", soft_wrap=True)
        return
    with Live(_view(status), console=console, auto_refresh=False) as live:
        while status.server == "running":
            time.sleep(_EVERY)
            status = read_status(folder)
            live.update(_view(status), refresh=True)


def _console() -> Console:
    return Console(markup=False, highlight=False)


def _view(status: FleetStatus) -> Group:
    return Group(*_head(status), _table(status), *_foot(status))


def _head(status: FleetStatus) -> list[str]:
    now = time.time()
    age = now - status.written
    word = {"running": "running", "over": "the run is over", "stopped": "no server is running"}[status.server]
    old = f", as of {_ago(age)}" if status.server != "running" or age > _LONG else ""
    lines = [f"{status.run}: {word}{old}; round {status.round} of {status.rounds}"]
    if status.server != "over":
        there = sum(device.state not in ("gone", "joining") for device in status.devices)
        lines.append(
            f"{sum(device.enrolled for device in status.devices)} enrolled, {there} here; "
            f"{status.replies} of {status.wanted} answers, round open for {now - status.since:.0f} s"
        )
    if status.awaited:
        names = {device.number: device.name for device in status.devices}
        lines.append(f"waiting for: {', '.join(_who(number, names.get(number)) for number in status.awaited)}")
    return lines


def _who(number: int, name: str | None) -> str:
    return f"device {number} (nobody has joined as it)" if name is None else f"{name} (device {number})"


def _table(status: FleetStatus) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("no.", "device", "state", "round", "images", "memory", "up", "down", "seen"):
        table.add_column(heading, no_wrap=True)
    for device in status.devices:
        table.add_row(
            str(device.number), device.name, "awaited" if device.awaited and device.state == "asked" else device.state,
            "-" if device.held < 0 else str(device.held), str(device.samples or "-"),
            f"{device.peak_kib * 1.024e-3:.1f} MB" if device.peak_kib else "-", _bytes(device.sent),
            _bytes(device.received),
            "-" if device.last_seen is None else _ago(status.written - device.last_seen),
        )  # fmt: skip
    return table


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _remarks(device: DeviceStatus, status: FleetStatus) -> list[str]:
    said = []
    if not device.enrolled:
        said.append("not enrolled: never ready yet")
    if device.state == "gone" and device.awaited:
        said.append("the round waits for it")
    if device.rests_until > status.round:
        said.append(f"rests until round {device.rests_until}")
    if device.failures:
        said.append(f"{device.failures} failure{'s' * (device.failures > 1)} in a row")
    return [*said, *(f"refused: {reason} ({count})" for reason, count in device.refused.items())]


def _foot(status: FleetStatus) -> list[str]:
    lines = [f"{device.name}: {said}" for device in status.devices if (said := "; ".join(_remarks(device, status)))]
    lines += [f"sent away: {name}: {reason}" for name, reason in status.sent_away.items()]
    if status.refused:
        counts = ", ".join(f"{reason} ({count})" for reason, count in status.refused.items())
        lines.append(f"messages that changed nothing: {counts}")
    return lines


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"

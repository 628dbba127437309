"""What a server knows of its fleet, in a file of the run's folder: while it runs, and as it was when it ended."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Literal

from foreseed.engine.files import write_whole
from foreseed.runs.folder import LOCK, RunFolderError, damaged, read_text
from foreseed.runs.records import Record, to_json

_STATUS = "status.json"


class DeviceStatus(Record):
    """A device, as the server sees it."""

    name: str
    number: int
    state: str
    enrolled: bool
    """Whether its number is its own for the whole run."""
    awaited: bool
    """Whether the round waits for its answer."""
    last_seen: float | None
    """Seconds since 1970."""
    held: int
    """The round whose values it holds; below 0: none."""
    samples: int
    peak_kib: int
    sent: int
    received: int
    failures: int
    """In a row, up to now."""
    rests_until: int
    """The round in which it may be asked again."""
    refused: dict[str, int]
    """Answers of it that did not count, by reason."""


class FleetStatus(Record):
    """A fleet at one moment."""

    written: float
    """Seconds since 1970, as all times here."""
    server: Literal["running", "over", "stopped"]
    run: str
    round: int
    """The one that is open, or was last."""
    rounds: int
    since: float
    """When it was opened."""
    wanted: int
    replies: int
    awaited: tuple[int, ...]
    """Numbers of devices that the round waits for, whether they ever joined or not."""
    devices: tuple[DeviceStatus, ...]
    sent_away: dict[str, str]
    """Names that could not take part, and why."""
    refused: dict[str, int]
    """All messages that changed nothing, by reason."""


def write_status(folder: Path, status: FleetStatus) -> None:
    """Write it whole, over the one before."""
    write_whole(folder / _STATUS, to_json(status))


def was_served(folder: Path) -> bool:
    """Whether a run had real devices."""
    return (folder / _STATUS).exists()


def read_status(folder: Path) -> FleetStatus:
    """The last one written. A server that was killed had no time to say so: its lock is free."""
    if not was_served(folder):
        raise RunFolderError(
            f"{folder}: no fleet was served there ({_STATUS} is missing); name the folder of a served run"
        )
    try:
        status = FleetStatus.model_validate_json(read_text(folder / _STATUS))
    except ValueError as error:
        raise damaged(folder / _STATUS, str(error)) from None
    if status.server == "running" and not is_running(folder):
        return status.model_copy(update={"server": "stopped"})
    return status


def is_running(folder: Path) -> bool:
    """Whether a process has the run's folder for itself."""
    try:
        with open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True

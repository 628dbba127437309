"""The server's knowledge of its fleet, written to the run's folder every few seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from foreseed.fleet.conductor import Conductor, Device
from foreseed.runs.status import DeviceStatus, FleetStatus, write_status
from foreseed.wire import Ack, Leave, Message

_INTERVAL = 2.0
_SHARE = 0.05
"""Of the server's time that writing may take: a very large fleet is written more rarely."""
_MOST_NAMES = 1000
"""Of devices that were sent away; the first to be so are forgotten first."""


class StatusFile:
    """Notes what devices are told, and writes how things stand."""

    def __init__(self, folder: Path, run: str, rounds: int) -> None:
        self._folder, self._run, self._rounds = folder, run, rounds
        self._refused: dict[str, Counter[str]] = {}
        self._sent_away: dict[str, str] = {}
        self._opened = (0, 0.0)
        self._next = 0.0

    def note(self, name: str, message: Message) -> None:
        """A message goes out to a device: it may say why something of it did not count."""
        if isinstance(message, Leave):
            self._sent_away.pop(name, None)
            self._sent_away[name] = message.reason
            if len(self._sent_away) > _MOST_NAMES:
                del self._sent_away[next(iter(self._sent_away))]
        elif isinstance(message, Ack) and message.refused:
            self._refused.setdefault(name, Counter())[message.refused] += 1

    def write(self, conductor: Conductor, dropped: Mapping[str, int], now: float) -> None:
        """Write, if it is time to; `now` is the conductor's clock."""
        if self._opened[0] != conductor.coordinator.round:
            self._opened = (conductor.coordinator.round, time.time())
        if now >= self._next:
            self._write(conductor, dropped, now, "running")
            self._next = now + max(_INTERVAL, (time.monotonic() - now) / _SHARE)

    def end(self, conductor: Conductor, dropped: Mapping[str, int], over: bool) -> None:
        """Write how it was when the server ended."""
        self._write(conductor, dropped, time.monotonic(), "over" if over else "stopped")

    def _write(
        self,
        conductor: Conductor,
        dropped: Mapping[str, int],
        now: float,
        server: Literal["running", "over", "stopped"],
    ) -> None:
        coordinator, to_clock = conductor.coordinator, time.time() - now
        awaited = set() if server == "over" else coordinator.waiting
        # One that came back and was taken is no longer away; one that another process replaced is.
        here = {device.name for device in conductor.devices.values() if device.state != "gone"}
        status = FleetStatus(
            written=now + to_clock,
            server=server,
            run=self._run,
            round=min(coordinator.round, self._rounds),
            rounds=self._rounds,
            since=self._opened[1],
            wanted=coordinator.rules.per_round,
            replies=len(coordinator.replies),
            awaited=tuple(sorted(awaited)),
            devices=tuple(
                self._device(device, device.number in awaited, to_clock)
                for device in sorted(conductor.devices.values(), key=lambda device: device.number)
            ),
            sent_away={
                name: reason
                for name, reason in (self._sent_away | conductor.not_understood).items()
                if name not in here
            },
            refused=dict(conductor.refused + Counter(dropped)),
        )
        write_status(self._folder, status)

    def _device(self, device: Device, awaited: bool, to_clock: float) -> DeviceStatus:
        return DeviceStatus(
            name=device.name,
            number=device.number,
            state=device.state,
            enrolled=device.enrolled,
            awaited=awaited,
            last_seen=None if device.last_seen is None else device.last_seen + to_clock,
            held=device.held,
            samples=device.samples,
            peak_kib=device.peak_kib,
            sent=device.sent,
            received=device.received,
            failures=device.failures,
            rests_until=device.rests_until,
            refused=dict(self._refused.get(device.name, {})),
        )

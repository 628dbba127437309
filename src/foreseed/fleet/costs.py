"""What a run on real devices took beyond the payload, for its summary."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def fleet_costs(rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, int]) -> dict[str, Any] | None:
    """The costs of all rows of a run; `numbers` are those of the devices, by name.

    A server that was killed counted too, but a run may have begun in the simulator: None, if no row is of real devices.
    """
    rows = [row for row in rows if row["peaks_kib"] is not None]
    if not rows:
        return None
    names, peaks = {number: name for name, number in numbers.items()}, dict[str, int]()
    for row in rows:
        for number, peak in zip(row["participants"], row["peaks_kib"], strict=True):
            name = names.get(number, f"device {number}")  # one that is not enrolled any more
            peaks[name] = max(peak, peaks.get(name, 0))
    return {
        "devices": len(names),
        "device_peak_mb": max(peaks.values()) * 1024 / 1e6,
        "device_peaks_kib": peaks,
        "refused": dict(sum((Counter(row["refused"]) for row in rows), Counter[str]())),
        "wire_up_bytes": _wire(rows, "wire_up"),
        "wire_down_bytes": _wire(rows, "wire_down"),
        "payload_up_bytes": sum(row["bytes_up"] for row in rows),
        "payload_down_bytes": sum(row["bytes_down"] for row in rows),
        "round_overhead_ms": statistics.median_high(row["round_overhead_ms"] for row in rows),
    }


def _wire(rows: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """Bytes on devices' sockets, where every row knows them."""
    known = [row[key] for row in rows if row[key] is not None]
    return sum(known) if len(known) == len(rows) else None

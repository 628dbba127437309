"""What one device holds at its peak: planned, observed, and as a real process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foreseed.engine import Engine, Program, Samples
from foreseed.engine.types import Buffer
from foreseed.meter.memory import planned_bp_bytes
from foreseed.meter.process import MeterError, process_peak_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """The peak memory of one device; what was not measured is None."""

    planned_bytes: int
    observed_bytes: int | None
    process_peak_bytes: int | None
    batch: int
    note: str
    """What is in it."""


def bp_free_memory(
    program: Program,
    values: Buffer,
    records: Buffer,
    batch: int,
    held: int = 0,
    what: str = "",
    keep: Sequence[int] = (),
) -> DeviceMemory:
    """Of a device that goes forward only, with `batch` images in memory; some records are run through it.

    A method may have it hold more bytes, of `what`, or `keep` what comes before some values, to go on from there.
    """
    engine = Engine(program, batch=batch, keep=keep)
    samples = Samples.records(records, program.image_bytes)
    engine.loss(values, samples.part(0, min(samples.count, max(batch, 4))))
    note = "program, values, perturbed copy, activations and input of a lean device"
    return DeviceMemory(
        engine.planned_bytes + held, engine.observed_bytes + held, _process_peak("bp-free", program, batch, held),
        batch, f"{note}; {what}" if what else note,
    )  # fmt: skip


def bp_memory(program: Program, batch: int, momentum: bool, held: int = 0, what: str = "") -> DeviceMemory:
    """Of a device that backpropagates through the dense model; a method may have it hold more bytes, of `what`."""
    note = "parameters, gradients, optimiser state and saved activations of dense tensors"
    return DeviceMemory(
        planned_bp_bytes(program, batch, momentum).total + held, None, _process_peak("bp", program, batch, held), batch,
        f"{note}; {what}" if what else note,
    )  # fmt: skip


def _process_peak(kind: Literal["bp", "bp-free"], program: Program, batch: int, held: int = 0) -> int | None:
    """Measured in a process of its own; a machine that cannot start one does not undo the run."""
    try:
        return process_peak_bytes(kind, program, batch, held)
    except MeterError:
        return None

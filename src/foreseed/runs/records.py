"""What a run writes and everybody reads: the row of a round, and the summary. A new metric starts here.

`metrics.jsonl` holds a `Row` a line, `summary.json` the `Summary`. Report, comparison, trackers and benchmarks read
these types and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Accuracy = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    """Read and written as JSON; keys that a later version may add are passed over, so that old reports read on."""

    # A loss that is no number any more stays one that can be told from a loss that was not measured.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")


class Row(Record):
    """A round: what it did and cost, all devices together; tests are None where nothing was evaluated."""

    round: int
    lr: float
    train_loss: float
    devices: int
    samples: int
    forward_passes: int
    flops: int
    dense_flops: int
    participants: tuple[int, ...]
    bytes_up: int
    bytes_down: int
    seconds: float
    accuracy: Accuracy | None
    loss: float | None
    ema_accuracy: Accuracy | None
    ema_loss: float | None
    snr: float | None = None
    """Signal-to-noise ratio of the round's estimate; None where nothing tells. One round's is rough, even negative."""
    remembered: float | None = None
    """How much of devices' earlier estimates counted, 0 to 1; None without a memory."""
    left_out: tuple[int, ...] = ()
    """Participants that did not count: they have pulled against all others for many rounds."""
    n_live: int | None = None
    """Values that live after the round: methods may move their mask."""
    personal_accuracy: Accuracy | None = None
    """Of the participants' own models on their own held-out images, on average; None where they have none."""
    personal_density: float | None = None
    """Share of weights that live in those models, on average."""
    # Of real devices only:
    wire_up: int | None = None
    """Bytes on the devices' sockets, framing and TLS included."""
    wire_down: int | None = None
    wire: tuple[tuple[int, int], ...] | None = None
    """Up and down, participant by participant."""
    round_overhead_ms: float | None = None
    """The round's time beyond its slowest device's computing."""
    refused: dict[str, int] | None = None
    """Messages that changed nothing, by reason."""
    sizes: tuple[int, ...] | None = None
    """Samples of each participant, as it said."""
    peaks_kib: tuple[int, ...] | None = None
    """Peak memory of the participants' processes."""


class Change(Record):
    """What was changed in a run that had begun: settings, or the round that it went on from."""

    round: int
    """After which the run went on with this."""
    settings: dict[str, tuple[Any, Any]] = {}
    """By key: before, and from then on."""
    went_back_from: int | None = None
    """The last round before the run went back; None if it did not."""
    abandoned: str | None = None
    """The file with the rows of the rounds that no longer count."""


class Totals(Record):
    """What all devices of a run spent together, or one device in one round."""

    flops: float
    dense_flops: float
    forward_passes: float
    bytes_up: float
    bytes_down: float


class RunTotals(Totals):
    """What a run spent, with its time."""

    seconds: float


class Memory(Record):
    """The peak memory of one device; what was not measured is None."""

    planned_bytes: int
    observed_bytes: int | None
    process_peak_bytes: int | None
    batch: int
    note: str


class Estimates(Record):
    """How good a run's estimates were in the last quarter of its rounds: single rounds say little."""

    snr: float
    """Mean signal-to-noise ratio of a round's estimate."""
    remembered: float | None
    """Mean share of what the server remembers that counted; None without a memory."""

    @staticmethod
    def of(rows: Sequence[Row]) -> Estimates | None:
        """From the rounds of a run; None where no round told."""
        snr = last_mean(rows, "snr")
        return None if snr is None else Estimates(snr=snr, remembered=last_mean(rows, "remembered"))


def last_mean(rows: Sequence[Row], key: str) -> float | None:
    """The mean of a number over the last quarter of the rounds, where it is known; None where it never is."""
    values = [getattr(row, key) for row in rows[-max(1, len(rows) // 4) :]]
    there = [value for value in values if value is not None and isfinite(value)]
    return fsum(there) / len(there) if there else None


class LayerCost(Record):
    """A layer's live and dense size and work."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    kind: str
    n_dense: int
    density: float | None
    macs: float
    dense_macs: float


class Pruning(Record):
    """What finding the mask cost."""

    pruner: str
    seconds: float
    device_bytes_up: float
    device_bytes_down: float
    device_flops: float
    bp_free: bool


class Shares(Record):
    """How many samples each device holds."""

    devices: int
    sizes: tuple[int, ...]
    stated: bool = False
    """By the devices themselves, as far as they were asked."""


class FleetCosts(Record):
    """What a run on real devices took beyond the payload."""

    devices: int
    device_peak_mb: float
    device_peaks_kib: dict[str, int]
    refused: dict[str, int]
    wire_up_bytes: int | None
    """None where devices do not see their sockets."""
    wire_down_bytes: int | None
    payload_up_bytes: int
    payload_down_bytes: int
    round_overhead_ms: float


class Summary(Record):
    """The results of a run."""

    name: str
    method: str
    engine: str
    seed: int
    rounds: int
    model: str
    data: str
    n_live: int
    n_total: int
    density: float
    macs: int
    dense_macs: int
    final_accuracy: Accuracy
    max_accuracy: Accuracy
    last_mean_accuracy: Accuracy
    final_ema_accuracy: Accuracy | None
    total: RunTotals
    per_device_round: Totals
    memory: Memory
    layers: tuple[LayerCost, ...]
    pruning: Pruning | None
    partition: Shares
    estimates: Estimates | None = None
    personal_accuracy: Accuracy | None = None
    """Of devices' own models in the last quarter of the rounds, each on its device's held-out images."""
    personal_density: float | None = None
    changes: tuple[Change, ...] | None = None
    """What was changed since the run began; None where nothing was."""
    fleet: FleetCosts | None = None


def to_json(record: Record, **options: Any) -> bytes:
    """A record as it is written; what was never set is left out."""
    return record.model_dump_json(exclude_unset=True, **options).encode()

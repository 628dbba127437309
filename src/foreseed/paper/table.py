"""A table of the paper beside the runs made for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreseed.paper.items import PaperArm
from foreseed.runs import Summary


@dataclass(frozen=True)
class ComparedArm:
    """What an arm came to here, and what the paper says of it; ratios are to FedAvg of the same model."""

    arm: str
    accuracy: float
    """Highest test accuracy in percent, as the paper has it."""
    last_accuracy: float
    """Mean of the last five tests, which no lucky test lifts."""
    flops: float | None
    """Of a device's round, in times FedAvg's; None where no FedAvg was run."""
    memory: float | None
    bytes_up: float
    bytes_down: float
    density: float
    rounds: int
    said: Mapping[str, float | None]
    """By the paper, if it has the arm."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def comparison_rows(arms: Sequence[PaperArm], summaries: Sequence[Summary]) -> list[ComparedArm]:
    """Every arm with its ratios to the first FedAvg of its model."""
    by_model = {s.model: s for s in reversed(summaries) if s.method == "fedavg"}

    def row(arm: PaperArm, summary: Summary) -> ComparedArm:
        base, mine = by_model.get(summary.model), summary.per_device_round
        return ComparedArm(
            arm=arm.label,
            accuracy=100 * summary.max_accuracy,
            last_accuracy=100 * summary.last_mean_accuracy,
            flops=None if base is None else mine.flops / base.per_device_round.flops,
            memory=None if base is None else summary.memory.planned_bytes / base.memory.planned_bytes,
            bytes_up=mine.bytes_up,
            bytes_down=mine.bytes_down,
            density=summary.density,
            rounds=summary.rounds,
            said={"accuracy": arm.accuracy, "flops": arm.flops, "memory": arm.memory},
        )

    return [row(arm, summary) for arm, summary in zip(arms, summaries, strict=True)]

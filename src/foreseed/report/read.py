"""Reading a run folder, with one clear error for a missing or damaged one."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from foreseed.engine.errors import ForeseedError

Array = npt.NDArray[np.float64]
Accuracy = Annotated[float, Field(ge=0, le=1)]
_Model = TypeVar("_Model", bound=BaseModel)


class ReportError(ForeseedError):
    """A report that cannot be written."""


class RunFolderError(ReportError):
    """A run folder that is missing, unfinished or damaged."""


class _Record(BaseModel):
    # Keys that a later version may add are passed over, so that old reports can be read on.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Round(_Record):
    """A line of metrics.jsonl; the accuracies and test losses are None where nothing was evaluated."""

    round: int
    flops: float
    bytes_up: float
    bytes_down: float
    accuracy: Accuracy | None
    loss: float | None
    ema_accuracy: Accuracy | None


class Totals(_Record):
    """What all devices of a run spent together, or one device in one round."""

    flops: float
    dense_flops: float
    forward_passes: float
    bytes_up: float
    bytes_down: float


class RunTotals(Totals):
    """What a run spent, with its time."""

    seconds: float


class Memory(_Record):
    """The peak memory of one device; what was not measured is None."""

    planned_bytes: float
    observed_bytes: float | None
    process_peak_bytes: float | None


class Layer(_Record):
    """A layer's live and dense size and work."""

    name: str
    kind: str
    n_dense: int
    density: float | None
    macs: float
    dense_macs: float


class Pruning(_Record):
    """What finding the mask cost."""

    pruner: str
    seconds: float
    device_bytes_up: float
    device_bytes_down: float
    device_flops: float
    bp_free: bool


class Shares(_Record):
    """How many samples each device holds."""

    devices: int
    sizes: tuple[int, ...]


class FleetCosts(_Record):
    """What a run on real devices took beyond the payload."""

    wire_up_bytes: float
    wire_down_bytes: float
    device_peak_mb: float
    round_overhead_ms: float


class Summary(_Record):
    """The results of a run, as summary.json holds them."""

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
    macs: float
    dense_macs: float
    final_accuracy: Accuracy
    max_accuracy: Accuracy
    last_mean_accuracy: Accuracy
    final_ema_accuracy: Accuracy | None
    total: RunTotals
    per_device_round: Totals
    memory: Memory
    layers: tuple[Layer, ...]
    pruning: Pruning | None
    partition: Shares
    fleet: FleetCosts | None = None


@dataclass(frozen=True)
class Run:
    """A finished run: its results, its rounds, its settings and the machine it ran on."""

    folder: Path
    summary: Summary
    rounds: tuple[Round, ...]
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]

    @cached_property
    def flops_so_far(self) -> Array:
        """FLOPs of all devices up to each round."""
        return np.cumsum([r.flops for r in self.rounds])

    @cached_property
    def bytes_so_far(self) -> Array:
        """Payload bytes of all devices, up and down, up to each round."""
        return np.cumsum([r.bytes_up + r.bytes_down for r in self.rounds])


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read run folders in the order given, each once."""
    if not folders:
        raise ReportError("no run folder was given; name at least one, such as runs/ntk-baffle")
    return [read_run(folder) for folder in {Path(folder).resolve(): folder for folder in folders}.values()]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read one run folder; a folder that is missing, unfinished or damaged is a RunFolderError."""
    path = Path(folder)
    if not path.is_dir():
        raise RunFolderError(f"{path}: there is no such folder; name the folder of a finished run")
    if not (path / "summary.json").exists():
        raise RunFolderError(f"{path}: {_why_no_summary(path)}")
    summary = _parse(Summary, path / "summary.json", read_text(path / "summary.json"))
    config_text = read_text(path / "config.toml")
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise damaged(path / "config.toml", str(error)) from error
    environment = _parse(RootModel[dict[str, Any]], path / "env.json", read_text(path / "env.json")).root
    return Run(path, summary, _rounds(path / "metrics.jsonl", summary), config_text, config, environment)


def _why_no_summary(path: Path) -> str:
    held = sorted(p.parent.name for p in path.glob("*/summary.json"))
    if held:
        return f"this folder is not a run but holds runs ({', '.join(held)}); name those instead"
    if (path / "metrics.jsonl").exists():
        return "the run has not finished (no summary.json); finish it with `foreseed run --resume`"
    return "not a run folder (no summary.json); name the folder of a finished run"


def _rounds(path: Path, summary: Summary) -> tuple[Round, ...]:
    lines = read_text(path).splitlines()
    rounds = tuple(_parse(Round, path, line, f"line {i}") for i, line in enumerate(lines, 1))
    numbers = [r.round for r in rounds]
    if numbers != sorted(set(numbers)) or not numbers or numbers[-1] != summary.rounds:
        end = f"ends at round {numbers[-1]}" if numbers else "is empty"
        raise damaged(path, f"it {end} or is out of order, and summary.json tells of {summary.rounds} rounds")
    if all(r.accuracy is None for r in rounds):
        raise damaged(path, "no round was evaluated")
    return rounds


def read_text(path: Path) -> str:
    """The text of a file of a run folder."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunFolderError(f"{path}: this file of the run folder is missing; run it again") from error
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from error


def _parse(model: type[_Model], path: Path, text: str, where: str = "") -> _Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [where, ".".join(str(part) for part in first["loc"]), first["msg"]]
        raise damaged(path, ": ".join(part for part in place if part)) from error


def damaged(path: Path, reason: str) -> RunFolderError:
    """The error for a file that cannot be read as what it should be."""
    return RunFolderError(f"{path}: damaged ({reason}); restore the file or run it again")

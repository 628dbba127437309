"""A run of a second, on the built-in digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreseed.config import Config, load
from foreseed.runs import Progress, Summary
from foreseed.simulate import run_simulated

TINY = [
    "rounds=4", "eval_every=2", "data.devices=4", "data.per_round=2", "train.k=2", "prune.pruner=random", "workers=1",
]  # fmt: skip


def tiny(*overrides: str) -> Config:
    return load(None, [*TINY, *overrides])


def stop_after(rounds: int) -> Any:
    """A watch that stops the run as Ctrl-C does."""

    def watch(progress: Progress) -> None:
        if progress.stage == "train" and progress.done == rounds:
            raise KeyboardInterrupt

    return watch


def stopped_and_resumed(config: Config, folder: Path) -> Summary:
    """A run that was stopped after two rounds, and went on."""
    with pytest.raises(KeyboardInterrupt):
        run_simulated(config, folder, watch=stop_after(2))
    return run_simulated(config, folder, resume=True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

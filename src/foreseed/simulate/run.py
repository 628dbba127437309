"""A run: rounds, evaluation, metrics and checkpoints in a run folder that survives a kill at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from foreseed.config import Config, differences
from foreseed.config import load as load_config
from foreseed.data import picture
from foreseed.engine import ForeseedError
from foreseed.engine.files import PARTIAL, write_whole
from foreseed.methods import METHODS
from foreseed.prune import Step, save_mask
from foreseed.simulate import checkpoint
from foreseed.simulate.fleet import Fleet
from foreseed.simulate.summary import summarise
from foreseed.simulate.world import World, make_world

LOCK = ".lock"


class RunError(ForeseedError):
    """A run that cannot start, go on, or be trusted any further."""


@dataclass(frozen=True)
class Progress:
    """Where a run is, for a live line."""

    config: Config
    stage: str
    """"prune" or "train"."""
    done: int
    total: int
    row: dict[str, Any]
    """The last round's metrics; empty while pruning."""
    accuracy: float | None
    """Of the last evaluation."""


Watch = Callable[[Progress], None]


def run(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    world: World | None = None,
    devices: Callable[[World], Fleet] = Fleet,
) -> dict[str, Any]:
    """Run a config in a folder and return its summary; with `resume`, go on where a killed run was.

    `world` may be given where several runs share one, and `devices` other than simulated ones.
    """
    _claim(config, folder, resume)
    with _alone(folder):
        world = world or make_world(config, prune_watch(config, watch))
        _write_start(world, folder)
        method = METHODS[config.method]
        fleet = devices(world)
        try:
            state, rows = _restore(world, method, folder)
            _train(world, fleet, method, state, rows, folder, watch)
            world.program.save(folder / "model.fsp", state.values, state.stats)
            summary = summarise(world, rows) | fleet.finish(rows)
            write_whole(folder / "summary.json", json.dumps(summary, indent=1).encode())
            return summary
        finally:
            fleet.close()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder, and say in a sentence when the disk refuses.

    The lock goes with the process, however it ends.
    """
    try:
        with open(folder / LOCK, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{folder}: another process is at this run; wait for it, or stop it") from None
            yield
    except OSError as error:
        raise RunError(
            f"{error.filename or folder}: {error.strerror or error}; put that right, then go on with --resume"
        ) from None


def participants(folder: Path, rounds: int) -> list[list[int]]:
    """The devices that answered in each round of a run."""
    metrics = folder / "metrics.jsonl"
    try:
        taken = [json.loads(line)["participants"] for line in metrics.read_bytes().splitlines()]
    except (OSError, ValueError, KeyError):
        raise RunError(f"{folder}: expected the folder of a BP-free run, with its metrics.jsonl") from None
    if len(taken) < rounds:
        raise RunError(f"{folder}: that run has {len(taken)} rounds, this one {rounds}; set rounds={len(taken)}")
    return taken


def _train(
    world: World,
    fleet: Fleet,
    method: ModuleType,
    state: Any,
    rows: list[dict[str, Any]],
    folder: Path,
    watch: Watch | None,
) -> None:
    config = world.config
    accuracy = next((row["accuracy"] for row in reversed(rows) if row["accuracy"] is not None), None)
    with open(folder / "metrics.jsonl", "ab") as metrics:
        while len(rows) < config.rounds:
            began = time.perf_counter()
            try:
                row = method.round(world, fleet, state)
                row["seconds"] = time.perf_counter() - began
                row |= _evaluate(fleet, state, row["round"], config)
            except ForeseedError as error:
                raise RunError(f"{config.run_name}, round {len(rows) + 1}: {error}") from None
            accuracy = row["accuracy"] if row["accuracy"] is not None else accuracy
            rows.append(row)
            metrics.write(json.dumps(row).encode() + b"\n")
            metrics.flush()
            os.fsync(metrics.fileno())
            checkpoint.save(folder / "checkpoint" / "state.npz", method.arrays(state))
            if watch is not None:
                watch(Progress(config, "train", len(rows), config.rounds, row, accuracy))


def _evaluate(fleet: Fleet, state: Any, round: int, config: Config) -> dict[str, float | None]:
    row: dict[str, float | None] = {"accuracy": None, "loss": None, "ema_accuracy": None, "ema_loss": None}
    if round % config.eval_every and round != config.rounds:
        return row
    row["accuracy"], row["loss"] = fleet.evaluate(state.values, state.stats)
    if state.ema is not None:
        row["ema_accuracy"], row["ema_loss"] = fleet.evaluate(state.ema, state.stats)
    return row


def _claim(config: Config, folder: Path, resume: bool) -> None:
    """Take the folder: a new one, or that of the same config."""
    written = folder / "config.toml"
    if resume:
        if not written.exists():
            raise RunError(f"{folder}: no run to resume there; start it without --resume")
        changed = differences(load_config(written), config)
        if changed:
            raise RunError(f"{folder}: that run has another config ({'; '.join(changed)}); resume it with its own")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A half-written config is what a kill at this very moment leaves: nothing to resume, and nothing to lose.
        taken = any(entry.suffix != PARTIAL and entry.name != LOCK for entry in folder.iterdir())
    except OSError as error:
        raise RunError(f"{folder}: cannot make a run folder there ({error.strerror}); choose another --out") from None
    if taken:
        raise RunError(f"{folder} exists and is not empty; choose another --out, or go on with --resume")
    write_whole(written, config.to_toml().encode())


def _write_start(world: World, folder: Path) -> None:
    """What is known before the first round; a run that is resumed must start from the same world."""
    for name in ("checkpoint", "figures"):
        (folder / name).mkdir(exist_ok=True)
    digests, begun, env = world.digests(), folder / "checkpoint" / "world.json", folder / "env.json"
    then = json.loads(begun.read_bytes()) if begun.exists() else digests
    if changed := [part for part in digests if digests[part] != then.get(part)]:
        raise RunError(
            f"{folder}: made here, its {' and '.join(changed)} differ{'s' if len(changed) == 1 else ''} from what it "
            f"began with; resume it with the same data and the versions in {env.name}"
        )
    write_whole(begun, json.dumps(digests).encode())
    if not env.exists():
        write_whole(env, json.dumps(environment(), indent=1).encode())
    if world.pruning is not None:
        save_mask(folder / "mask.npz", world.pruning.mask)
    for name in ("partition.svg", "partition.png"):
        if not (folder / "figures" / name).exists():
            picture(world.partition, world.data.classes, folder / "figures" / name)


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    from foreseed.engine import native

    return {
        "foreseed": version("foreseed"), "python": platform.python_version(), "numpy": np.__version__,
        "torch": torch.__version__, "machine": platform.machine(), "system": platform.system(),
        "cores": os.cpu_count(), "instruction_set": native.isa(),
    }  # fmt: skip


def _restore(world: World, method: ModuleType, folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The state of the last checkpoint, and the metrics up to it; a line written after it is dropped."""
    saved, metrics = folder / "checkpoint" / "state.npz", folder / "metrics.jsonl"
    arrays = checkpoint.load(saved) if saved.exists() else None
    done = 0 if arrays is None else int(arrays["round"])
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    # A round's line is written just before its checkpoint: a kill leaves at most one too many.
    if not done <= len(lines) <= done + 1:
        raise RunError(
            f"{folder}: {len(lines)} lines of metrics beside a checkpoint of round {done}, files of this run are lost; "
            "start it anew in another folder"
        )
    write_whole(metrics, b"".join(lines[:done]))
    state = method.init(world) if arrays is None else method.restore(world, arrays)
    return state, [json.loads(line) for line in lines[:done]]


def prune_watch(config: Config, watch: Watch | None) -> Callable[[Step], None] | None:
    """A run's watch as that of its pruning."""
    if watch is None:
        return None
    return lambda step: watch(Progress(config, "prune", step.iteration, step.iterations, {}, None))

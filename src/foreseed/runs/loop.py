"""A run: rounds, evaluation, metrics and checkpoints, for any method on any devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from foreseed.config import Config, methods
from foreseed.config.method_registry import Method
from foreseed.engine import ForeseedError
from foreseed.methods import Devices, RoundResult, State, Task
from foreseed.prune import Step, save_mask
from foreseed.runs import checkpoint
from foreseed.runs.folder import RunError, RunFolder, environment
from foreseed.runs.lease import Lease
from foreseed.runs.mending import Resumption, changes_of, plan
from foreseed.runs.records import Row, Summary
from foreseed.runs.summary import summarise
from foreseed.runs.trackers import Trackers

_GROWN = 1.3
"""Times its minimum: a test loss that has grown so much, and goes on growing, is worth a word."""
_TESTS = 3
"""Tests in a row that it must have grown in."""


@dataclass(frozen=True)
class Progress:
    """Where a run is, for a live line."""

    config: Config
    stage: str
    """"prune" or "train"."""
    done: int
    total: int
    row: Row | None
    """The last round; None while pruning, and before the first."""
    accuracy: float | None
    """Of the last evaluation."""
    note: str = ""
    """Something that the user should know, said once."""


Watch = Callable[[Progress], None]


def run(
    config: Config,
    folder: Path,
    prepare: Callable[[Config], tuple[Task, Devices]],
    *,
    resume: bool = False,
    at: int | None = None,
    changes: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    check: Callable[[Row], None] | None = None,
    lease: Lease | None = None,
) -> Summary:
    """Run a config in a folder and return its summary; with `resume`, go on where a killed run was.

    A run that is resumed may go back to a round `at` which a checkpoint is kept, and go on with other values of the
    keys in `changes` (`foreseed.config.CHANGEABLE`). `prepare` is called once the folder is ours, with the config that
    holds from now on: pruning takes its time. `check` may refuse a round before it counts. A run that is refused
    before its first round has counted leaves nothing behind. With a `lease`, other machines may see the folder too.
    """
    place, here = RunFolder(folder, lease), environment()
    with place.claimed(resume):
        resumption = plan(place, config, changes or {}, at) if resume else Resumption(config, place, None)
        config = resumption.config
        trackers = Trackers(config)
        task, devices = prepare(config)
        rows: list[Row] = []
        refused = False
        try:
            method = methods()[config.method]
            state = method.init(task)
            place.begin(config, devices.digests() | task.digests(), here)
            if (said := resumption.carry_out()) and watch is not None:
                watch(Progress(config, "train", checkpoint.round_of(place.checkpoint), config.rounds, None, None, said))
            if task.pruning is not None:
                save_mask(folder / "mask.npz", task.pruning.mask)
            done = checkpoint.restore(place.checkpoint, state) if place.checkpoint.exists() else 0
            checkpoint.keep_files(place.method_files, state)
            rows += place.rows(done)
            trackers.start(folder, done)
            _train(task, devices, method, state, rows, place, trackers, watch, check)
            if lease is not None:
                lease.check()
            state.program.save(folder / "model.fsp", state.values, state.stats, task.classes)
            if state.ema is not None:
                state.program.save(folder / "model-ema.fsp", state.ema, state.stats, task.classes)
            summary = summarise(task, devices, state, rows, changes_of(folder))
            place.finish(summary)
            trackers.finish(summary)
            return summary
        except ForeseedError:
            refused = not resume and not rows
            raise
        finally:
            trackers.finish(None)  # if the run did not come to its end
            devices.close()
            if refused:
                place.discard()


def _train(
    task: Task,
    devices: Devices,
    method: Method,
    state: State,
    rows: list[Row],
    place: RunFolder,
    trackers: Trackers,
    watch: Watch | None,
    check: Callable[[Row], None] | None,
) -> None:
    config = task.config
    with place.metrics() as metrics:
        while len(rows) < config.rounds:
            began = time.perf_counter()
            try:
                result = method.round(task, devices, state)
                seconds = time.perf_counter() - began
                row = _row(result, seconds, state.program.n_live, _evaluate(devices, state, result.round, config))
                if check is not None:
                    check(row)
            except ForeseedError as error:
                raise RunError(f"{config.run_name}, round {len(rows) + 1}: {error}") from None
            rows.append(row)
            place.add(row, metrics)
            trackers.log(row)  # before the checkpoint: a kill may double a row there, but leaves none out
            checkpoint.save(place.checkpoint, len(rows), state, place.lease)
            place.kept.keep(len(rows))
            if watch is not None:
                accuracy = next((row.accuracy for row in reversed(rows) if row.accuracy is not None), None)
                note = opposing(rows) or (diverging(rows) if row.loss is not None else "")
                watch(Progress(config, "train", len(rows), config.rounds, row, accuracy, note))


def _row(result: RoundResult, seconds: float, n_live: int, tests: dict[str, Any]) -> Row:
    return Row(
        round=result.round,
        lr=result.lr,
        train_loss=result.train_loss,
        devices=len(result.participants),
        samples=result.samples,
        forward_passes=result.work.forward_passes,
        flops=result.work.flops,
        dense_flops=result.work.dense_flops,
        participants=tuple(result.participants),
        bytes_up=result.traffic.bytes_up,
        bytes_down=result.traffic.bytes_down,
        seconds=seconds,
        snr=result.snr,
        remembered=result.remembered,
        left_out=tuple(result.left_out),
        n_live=n_live,
        personal_accuracy=result.personal_accuracy,
        personal_density=result.personal_density,
        **tests,
        **result.traffic.measured,
    )


def _evaluate(devices: Devices, state: State, round: int, config: Config) -> dict[str, float | None]:
    tests: dict[str, float | None] = {"accuracy": None, "loss": None, "ema_accuracy": None, "ema_loss": None}
    if round % config.eval_every and round != config.rounds:
        return tests
    tests["accuracy"], tests["loss"] = devices.evaluate(state.program, state.values, state.stats)
    if state.ema is not None:
        tests["ema_accuracy"], tests["ema_loss"] = devices.evaluate(state.program, state.ema, state.stats)
    return tests


def diverging(rows: list[Row]) -> str:
    """A word on a test loss that grows and grows, the first time that it can be said; else nothing."""
    losses = [(row.round, row.loss) for row in rows if row.loss is not None]

    def grows(upto: int) -> bool:
        tail = [loss for _, loss in losses[:upto]][-_TESTS - 1 :]
        rising = len(tail) > _TESTS and all(a < b for a, b in pairwise(tail))
        return rising and tail[-1] > _GROWN * min(loss for _, loss in losses[:upto])

    if not grows(len(losses)) or any(grows(upto) for upto in range(1, len(losses))):
        return ""
    least = min(losses, key=lambda test: test[1])
    return (
        f"the test loss has grown from {least[1]:.3f} (round {least[0]}) to {losses[-1][1]:.3f}: steps are too long "
        "for the noise of the estimates; halve train.lr, or raise train.k and train.spread together"
    )


def opposing(rows: list[Row]) -> str:
    """A word on devices that are left out for the first time; else nothing."""
    known = {device for row in rows[:-1] for device in row.left_out}
    new = [str(device) for device in rows[-1].left_out if device not in known]
    if not new:
        return ""
    what = f"device {new[0]} has" if len(new) == 1 else f"devices {', '.join(new)} have"
    return f"{what} pulled against all others for many rounds, and will not count until that changes"


def prune_watch(config: Config, watch: Watch | None) -> Callable[[Step], None] | None:
    """A run's watch as that of its pruning."""
    if watch is None:
        return None
    weights = config.model.weights
    note = f"the weights of {weights} are pruned as they are, neither redrawn nor rescaled" if weights else ""
    return lambda step: watch(
        Progress(config, "prune", step.iteration, step.iterations, None, None, note if step.iteration == 1 else "")
    )

"""Trackers: who is told of every round, beside metrics.jsonl. Thin adapters over libraries that are optional extras.

A tracker is three functions; `docs/extend/tracker.md` goes through one. It reads the rows that everybody reads, and
must not matter to a run: one that fails is dropped with a word, and the run goes on.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from foreseed.config import Config, ConfigError
from foreseed.config.errors import fields
from foreseed.config.tracker_registry import entered
from foreseed.runs.records import Record, Row, Summary

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One who is told. Whatever it raises is said once, and the run goes on without it."""

    def start(self, config: Config, folder: Path, done: int) -> None:
        """A run starts in its folder, or goes on after so many rounds that are done; imports what it needs here."""

    def log(self, row: Row) -> None:
        """A round is over; `row.round` counts from 1. After a kill, its last row may come again."""

    def finish(self, summary: Summary | None) -> None:
        """The run is over: what it came to, or None if it failed or was stopped."""


def enter_tracker(name: str, make: Callable[[], Tracker]) -> None:
    """Make a tracker known by a name that users type; a second one of that name is a mistake."""
    if name in entered:
        raise ConfigError(f"tracker {name!r} is entered twice; give one of the two another name")
    entered[name] = make


def needs(extra: str, *modules: str) -> None:
    """Refuse, in a sentence, to do without libraries; all of them come with an extra of foreseed."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise ConfigError(
            f"track.to = {extra} needs {' and '.join(missing)}, not installed here; pip install 'foreseed[{extra}]'"
        )


class Trackers:
    """All trackers of a run. Made before it starts, so that an unknown or missing one stops nothing halfway."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._made = {name: entered[name]() if name in entered else _own(name) for name in config.track.names}
        self._live: dict[str, Tracker] = {}

    def start(self, folder: Path, done: int) -> None:
        self._live = dict(self._made)
        self._tell("start", lambda tracker: tracker.start(self._config, folder, done))

    def log(self, row: Row) -> None:
        self._tell("log", lambda tracker: tracker.log(row))

    def finish(self, summary: Summary | None) -> None:
        self._tell("finish", lambda tracker: tracker.finish(summary))
        self._live = {}

    def _tell(self, what: str, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                tell(tracker)
            except Exception as error:  # a library over a network may fail in any way; training is worth more
                del self._live[name]
                # Logged, not a warning: those may be errors, and this must not stop a run.
                _log.warning(
                    "%s: tracker %s failed (%s: %s: %s); the run goes on without it, every row is in metrics.jsonl",
                    self._config.run_name, name, what, type(error).__name__, " ".join(str(error).split()),
                )  # fmt: skip


def _own(name: str) -> Tracker:
    """A user's own tracker, by package.module:factory."""
    module_name, _, attribute = name.partition(":")
    try:
        tracker: Tracker = getattr(import_module(module_name), attribute)()
    except ConfigError:
        raise
    except Exception as error:  # the user's module may fail in any way
        raise ConfigError(
            f"track.to = {name}: cannot be made ({type(error).__name__}: {error}), expected package.module:factory "
            "that makes a tracker; install it or add its folder to PYTHONPATH"
        ) from None
    return tracker


# What most trackers take: numbers and settings by name.


def numbers(record: Record) -> dict[str, float]:
    """Every number of a row or a summary, by dotted name; what was not measured is left out."""
    return dict(_numbers("", record.model_dump()))


def settings(config: Config) -> dict[str, str | int | float | bool]:
    """Every key of a config, by dotted name."""
    tables = config.model_dump()
    keys = [key for key, field in fields(Config) if not _is_table(field.annotation)]
    return {key: tables[key] if "." not in key else tables[key.split(".")[0]][key.split(".")[1]] for key in keys}


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _numbers(prefix: str, values: dict[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(f"{prefix}{name}.", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def _batches(items: Sequence[Any], most: int = 100) -> Iterable[Sequence[Any]]:
    """MLflow takes a hundred at a time."""
    return (items[at : at + most] for at in range(0, len(items), most))


def _place(config: Config, folder: Path) -> Path:
    """Where a tracker writes: the folder that several runs share, or the run's own."""
    place = Path(config.track.folder) if config.track.folder else folder
    place.mkdir(parents=True, exist_ok=True)
    return place.absolute()


def _kept_id(folder: Path, name: str, make: Callable[[], str]) -> tuple[str, bool]:
    """The tracker's own name of this run, kept in the run's folder so that it goes on under it; whether it is new."""
    file = folder / "track" / name
    if file.exists():
        return file.read_text(), False
    file.parent.mkdir(exist_ok=True)
    made = make()
    file.write_text(made)
    return made, True


# The trackers.


class TensorBoard:
    """Event files for `tensorboard --logdir`, one folder a run."""

    def __init__(self) -> None:
        needs("tensorboard", "tensorboardX")
        self._writer: Any = None

    def start(self, config: Config, folder: Path, done: int) -> None:
        from tensorboardX import SummaryWriter

        shared = Path("tensorboard") / config.run_name if config.track.folder else Path("tensorboard")
        # TensorBoard forgets what an earlier part of this run has written of the rounds to come.
        purge = {"purge_step": done + 1} if done else {}
        # A file is named by the second: a run resumed at once would write over its first part without the suffix.
        self._writer = SummaryWriter(str(_place(config, folder) / shared), filename_suffix=f".{done}", **purge)
        self._write_text("config", config.to_toml(), done)

    def log(self, row: Row) -> None:
        for name, value in numbers(row).items():
            if name != "round":
                self._writer.add_scalar(name, value, row.round)
        self._writer.flush()

    def finish(self, summary: Summary | None) -> None:
        if summary is not None:
            self._write_text("summary", summary.model_dump_json(indent=1), summary.rounds)
        self._writer.close()

    def _write_text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)  # Markdown's code


class MLflow:
    """A run of MLflow's experiment `track.project`: in mlflow.db, or at $MLFLOW_TRACKING_URI if no folder is set."""

    def __init__(self) -> None:
        needs("mlflow", "mlflow", "sqlalchemy", "alembic")
        self._client: Any = None
        self._id = ""

    def start(self, config: Config, folder: Path, done: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = "" if config.track.folder else os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = MlflowClient(uri or f"sqlite:///{_place(config, folder) / 'mlflow.db'}")
        self._id, is_new = _kept_id(folder, "mlflow", lambda: self._create(config, folder, local=not uri))
        self._client.update_run(self._id, status="RUNNING")
        if is_new:  # MLflow lets no setting change, but a resumed run may: the folder's config.toml is the first one
            given = [Param(key, str(value)) for key, value in settings(config).items()]
            for some in _batches(given):
                self._client.log_batch(self._id, params=some)

    def log(self, row: Row) -> None:
        self._log({name: value for name, value in numbers(row).items() if name != "round"}, row.round)

    def finish(self, summary: Summary | None) -> None:
        if summary is not None:
            self._log({f"summary.{name}": value for name, value in numbers(summary).items()}, summary.rounds)
        self._client.set_terminated(self._id, "FAILED" if summary is None else "FINISHED")

    def _create(self, config: Config, folder: Path, local: bool) -> str:
        # A server decides itself where artifacts lie.
        at = (_place(config, folder) / "mlflow-artifacts").as_uri() if local else None
        known = self._client.get_experiment_by_name(config.track.project)
        experiment = known.experiment_id if known else self._client.create_experiment(config.track.project, at)
        created: str = self._client.create_run(experiment, run_name=config.run_name).info.run_id
        return created

    def _log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        for some in _batches([Metric(name, float(value), now, step) for name, value in values.items()]):
            self._client.log_batch(self._id, metrics=some)


class WeightsAndBiases:
    """A run of W&B's project `track.project`; $WANDB_MODE=offline keeps it here until `wandb sync`."""

    def __init__(self) -> None:
        needs("wandb", "wandb")
        self._run: Any = None

    def start(self, config: Config, folder: Path, done: int) -> None:
        import wandb

        name, _ = _kept_id(folder, "wandb", lambda: uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=config.track.project, name=config.run_name, id=name, resume="allow" if done else None,
            dir=str(_place(config, folder)), config=settings(config),
            reinit="create_new",  # a comparison has several runs in one process
            settings=wandb.Settings(console="off"),  # the terminal's progress line is not for it
        )  # fmt: skip

    def log(self, row: Row) -> None:
        self._run.log({name: value for name, value in numbers(row).items() if name != "round"}, step=row.round)

    def finish(self, summary: Summary | None) -> None:
        if summary is not None:
            self._run.summary.update({f"summary.{name}": value for name, value in numbers(summary).items()})
        self._run.finish(exit_code=1 if summary is None else 0)


enter_tracker("tensorboard", TensorBoard)
enter_tracker("mlflow", MLflow)
enter_tracker("wandb", WeightsAndBiases)

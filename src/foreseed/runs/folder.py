"""A run's folder: claimed once, written whole, read back; one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, RootModel, ValidationError

from foreseed.config import Config, differences, load
from foreseed.engine import ForeseedError
from foreseed.engine.files import PARTIAL, write_whole
from foreseed.runs.kept import FILES, STATE, Kept
from foreseed.runs.lease import PREFIX, Lease
from foreseed.runs.records import Row, Summary, to_json

METRICS = "metrics.jsonl"
LOCK = ".lock"
_LOOKS = (0.02, 0.1)
"""Seconds between tries to lock a folder: one who only looks whether it is locked holds the lock for a moment."""
_Model = TypeVar("_Model", bound=BaseModel)


class RunError(ForeseedError):
    """A run that cannot start, go on, or be trusted any further."""


class RunFolderError(ForeseedError):
    """A run folder that is missing, unfinished or damaged."""


class RunFolder:
    """The files of a run, for whoever writes them."""

    def __init__(self, path: Path, lease: Lease | None = None) -> None:
        """`lease`: where several machines may see the folder, each change is made by whoever holds it."""
        self.path, self.lease = path, lease
        self.config = path / "config.toml"
        self.checkpoint = path / "checkpoint" / STATE
        self.method_files = path / "checkpoint" / FILES
        """Where a method's state keeps files of its own."""
        self.kept = Kept(path / "checkpoint")

    @contextmanager
    def claimed(self, resume: bool) -> Iterator[None]:
        """Take a new folder, or that of a run that is there, and keep other processes out of it.

        A new run that is refused before it has begun (`begin`) leaves nothing behind. The lock goes with the process,
        however it ends. When the disk refuses, that is said in a sentence.
        """
        if resume and not self.config.exists():
            raise RunError(f"{self.path}: no run to resume there; start it without --resume")
        made = [] if resume else self._make()
        try:
            with self._locked() if self.lease is None else self._leased(self.lease):
                if not resume:
                    self._refuse_taken()  # by a process that was quicker
                try:
                    yield
                finally:
                    if not resume and not self._is_taken():
                        (self.path / LOCK).unlink()
                        if self.lease is not None:
                            self.lease.remove()
        except OSError as error:
            if self.lease is not None:
                self.lease.check()  # a file that is gone, since another server has taken over
            raise RunError(
                f"{error.filename or self.path}: {error.strerror or error}; put that right, then go on with --resume"
            ) from None
        finally:
            for folder in made:
                with suppress(OSError):  # something has come into it
                    folder.rmdir()

    def _make(self) -> list[Path]:
        """Make the folder; returns those that were not there."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_taken()
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot make a run folder there ({error.strerror}); choose another --out"
            ) from None
        return missing

    def _refuse_taken(self) -> None:
        if self._is_taken():
            raise RunError(f"{self.path} exists and is not empty; choose another --out, or go on with --resume")

    def _is_taken(self) -> bool:
        # A half-written config is what a kill at that very moment leaves: nothing to resume, and nothing to lose.
        ours = (LOCK, PREFIX)
        return any(entry.suffix != PARTIAL and not entry.name.startswith(ours) for entry in self.path.iterdir())

    @contextmanager
    def _leased(self, lease: Lease) -> Iterator[None]:
        with lease.held(), ExitStack() as stack:
            try:
                stack.enter_context(self._locked())
            except RunError:
                if not lease.from_silent:  # a run that is simulated in this folder
                    raise
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.path / LOCK
        with open(path, "ab") as lock:
            for pause in (*_LOOKS, None):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # A run that was refused in the meantime has taken its lock file away.
                    if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                        break
                except (BlockingIOError, FileNotFoundError):
                    pass
                if pause is None:
                    raise RunError(f"{self.path}: locked by another process; wait for it, or stop it")
                time.sleep(pause)
            yield

    def begin(self, config: Config, digests: dict[str, str], environment: dict[str, Any]) -> None:
        """Write what is known before the first round; a run that is resumed must start from the same parts."""
        begun, env = self.path / "checkpoint" / "begun.json", self.path / "env.json"
        then = json.loads(begun.read_bytes()) if begun.exists() else digests
        if changed := [part for part in digests if digests[part] != then.get(part)]:
            raise RunError(
                f"{self.path}: made here, its {' and '.join(changed)} differ{'s' if len(changed) == 1 else ''} from "
                f"what it began with; resume it with the same data, the same weights and the versions in {env.name}"
            )
        if not self.config.exists():
            write_whole(self.config, config.to_toml().encode(), fence=self.lease)
        for name in ("checkpoint", "figures"):
            (self.path / name).mkdir(exist_ok=True)
        # A run may begin in the simulator and go on with real devices, of whose data nothing is known.
        write_whole(begun, json.dumps(then | digests).encode(), fence=self.lease)
        if not env.exists():
            write_whole(env, json.dumps(environment, indent=1).encode(), fence=self.lease)

    def rows(self, done: int) -> list[Row]:
        """The rows of the rounds that the checkpoint has seen; one written after it is dropped."""
        metrics, lines = self.path / METRICS, self.lines()
        # A round's line is written just before its checkpoint: a kill leaves at most one too many.
        if not done <= len(lines) <= done + 1:
            raise RunError(
                f"{self.path}: {len(lines)} lines of metrics beside a checkpoint of round {done}, files of this run "
                "are lost; start it anew in another folder"
            )
        # A new file: what an earlier server still adds to the one that it has open, nobody reads.
        write_whole(metrics, b"".join(lines[:done]), fence=self.lease)
        return [_parse(Row, metrics, line.decode()) for line in lines[:done]]

    def lines(self) -> list[bytes]:
        """The rows as they are written, the last one perhaps in part."""
        metrics = self.path / METRICS
        return metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []

    @contextmanager
    def metrics(self) -> Iterator[BinaryIO]:
        """The file that rows are added to."""
        with open(self.path / METRICS, "ab") as file:
            yield file

    def add(self, row: Row, file: BinaryIO) -> None:
        """Write a row, to the disk."""
        if self.lease is not None:
            self.lease.check()
        file.write(to_json(row) + b"\n")
        file.flush()
        os.fsync(file.fileno())

    def discard(self) -> None:
        """Take away a run that has not come through its first round: there is nothing to go on with."""
        if self.lease is not None and self.lease.is_lost:
            return
        for name in ("mask.npz", "metrics.jsonl", "status.json", "env.json", "config.toml"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
        with suppress(OSError):  # a tracker's or a user's, then
            (self.path / "figures").rmdir()

    def finish(self, summary: Summary) -> None:
        """Write the summary, which is there only when a run is over."""
        write_whole(self.path / "summary.json", to_json(summary, indent=1), fence=self.lease)


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    import torch

    from foreseed.engine import native

    return {
        "foreseed": version("foreseed"), "python": platform.python_version(), "numpy": np.__version__,
        "torch": torch.__version__, "machine": platform.machine(), "system": platform.system(),
        "cores": os.cpu_count(), "instruction_set": native.isa(),
    }  # fmt: skip


# Reading what others have written.


def rows_so_far(folder: Path) -> list[Row]:
    """The rounds of a run that may not be over; a line that is being written is left out."""
    lines = RunFolder(folder).lines()
    whole = [line for line in lines if line.endswith(b"\n")]
    return [_parse(Row, folder / METRICS, line.decode(), f"line {i}") for i, line in enumerate(whole, 1)]


@dataclass(frozen=True)
class Run:
    """A finished run: its results, its rounds, its settings and the machine it ran on."""

    folder: Path
    summary: Summary
    rounds: tuple[Row, ...]
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]

    @cached_property
    def flops_so_far(self) -> npt.NDArray[np.float64]:
        """FLOPs of all devices up to each round."""
        return np.cumsum([float(r.flops) for r in self.rounds])

    @cached_property
    def bytes_so_far(self) -> npt.NDArray[np.float64]:
        """Payload bytes of all devices, up and down, up to each round."""
        return np.cumsum([float(r.bytes_up + r.bytes_down) for r in self.rounds])


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
    env = _parse(RootModel[dict[str, Any]], path / "env.json", read_text(path / "env.json")).root
    return Run(path, summary, _rounds(path / "metrics.jsonl", summary), config_text, config, env)


def is_finished(folder: Path, config: Config) -> bool:
    """Whether the run of this config lies there, finished: run again it would come to the same."""
    return (folder / "summary.json").exists() and not differences(load(folder / "config.toml"), config)


def _why_no_summary(path: Path) -> str:
    held = sorted(p.parent.name for p in path.glob("*/summary.json"))
    if held:
        return f"this folder is not a run but holds runs ({', '.join(held)}); name those instead"
    if (path / "metrics.jsonl").exists():
        return "the run has not finished (no summary.json); finish it with `foreseed run --resume`"
    return "not a run folder (no summary.json); name the folder of a finished run"


def _rounds(path: Path, summary: Summary) -> tuple[Row, ...]:
    lines = read_text(path).splitlines()
    rounds = tuple(_parse(Row, path, line, f"line {i}") for i, line in enumerate(lines, 1))
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

"""Whole runs on Ray: each a task on one core of whatever node it comes to."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from foreseed.config import Config
from foreseed.engine import ForeseedError
from foreseed.runs import Summary, read_run
from foreseed.runs.folder import LOCK, RunFolder
from foreseed.simulate import run_simulated
from foreseed.simulate.on_ray import check_versions, connect, versions

Wanted = tuple[Config, Path, bool]
"""A run, its folder, and whether it goes on with what lies there."""


def run_on_ray(on: str, wanted: Sequence[Wanted]) -> Iterator[tuple[int, Summary | str]]:
    """Run all, as many at a time as there are cores; gives each one's number, and its summary or why it failed.

    Folders are ours from the start, and each is filled when its run comes to its end.
    """
    ray = connect(on)
    task = ray.remote(num_cpus=1, max_retries=-1)(run_whole)
    with ExitStack() as folders:
        futures = {}
        for index, (config, folder, resume) in enumerate(wanted):
            try:
                folders.enter_context(RunFolder(folder).claimed(resume))
            except ForeseedError as error:
                yield index, str(error)
                continue
            begun = pack(folder) if resume else None
            futures[task.remote(config.with_({"workers": 1}), begun, versions())] = index
        waiting = list(futures)
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            index, folder = futures[done], wanted[futures[done]][1]
            if not isinstance(packed := ray.get(done), str):
                unpack(packed, folder)
            yield index, packed if isinstance(packed, str) else read_run(folder).summary


def run_whole(config: Config, begun: bytes | None, asked: tuple[str, str]) -> bytes | str:
    """A run, or the rest of one that was `begun`: its folder, packed, or why it failed.

    `asked` are the versions of whoever wants it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        try:
            check_versions(versions(), asked)
            if begun is not None:
                unpack(begun, folder)
            run_simulated(config, folder, resume=begun is not None)
        except ForeseedError as error:
            return str(error)
        return pack(folder)


def pack(folder: Path) -> bytes:
    """A run's folder, without its lock."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        # The summary says that all else is there, so it comes last.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "summary.json"):
            if path.name != LOCK:
                tar.add(path, arcname=path.name)
    return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Put a run's folder where it belongs."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")

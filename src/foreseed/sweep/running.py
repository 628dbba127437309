"""Running the points of a sweep: several at a time, each in a process of its own, none twice."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreseed.config import Config
from foreseed.engine import ForeseedError
from foreseed.runs import Summary, is_finished, read_run
from foreseed.simulate import run_simulated
from foreseed.sweep.points import Point


@dataclass(frozen=True)
class Outcome:
    """What a point came to."""

    point: Point
    folder: Path
    summary: Summary | None
    failure: str = ""
    """Why it has no summary, such as a rate that made it diverge."""


def run_all(
    points: Sequence[Point], folder: Path, jobs: int, progress: Callable[[Outcome, int], None] = lambda *_: None
) -> list[Outcome]:
    """Run all points, `jobs` at a time; what is finished in the folder counts, what was stopped there goes on.

    `progress` is told of each outcome, with the number of those that are known. A point that fails leaves the others
    alone. Results come in the order of the points.
    """
    found: dict[int, Outcome] = {}

    def note(index: int, outcome: Outcome) -> None:
        found[index] = outcome
        progress(outcome, len(found))

    missing = []
    for index, point in enumerate(points):
        at = folder / point.folder
        if is_finished(at, point.config):
            note(index, Outcome(point, at, read_run(at).summary))
        else:
            missing.append(index)
    with _executor(min(jobs, len(missing))) as executor:
        futures: dict[Future[Summary | str], int] = {
            executor.submit(_run, points[index].named, folder / points[index].folder): index for index in missing
        }
        for future in as_completed(futures):
            index, result = futures[future], future.result()
            at = folder / points[index].folder
            if isinstance(result, str):
                note(index, Outcome(points[index], at, None, result))
            else:
                note(index, Outcome(points[index], at, result))
    return [found[index] for index in range(len(points))]


@contextmanager
def _executor(jobs: int) -> Iterator[Executor]:
    # A fresh process each: torch's threads do not survive a fork.
    executor = ProcessPoolExecutor(max(1, jobs), mp_context=multiprocessing.get_context("spawn"))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _run(config: Config, folder: Path) -> Summary | str:
    """One run on one core; the reason, if it fails."""
    try:
        return run_simulated(config, folder, resume=(folder / "config.toml").exists())
    except ForeseedError as error:
        return str(error)

"""Running the points of a sweep: several at a time, each in a process of its own or on Ray, none twice."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from foreseed.config import Config
from foreseed.engine import ForeseedError
from foreseed.runs import Summary, is_finished, read_run
from foreseed.simulate import run_simulated
from foreseed.sweep.on_ray import Wanted, run_on_ray
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
    points: Sequence[Point],
    folder: Path,
    jobs: int,
    progress: Callable[[Outcome, int], None] = lambda *_: None,
    on: str = "",
) -> list[Outcome]:
    """Run all points, `jobs` at a time, or as many as a Ray cluster has cores; results come in the points' order.

    `progress` is told of each outcome, with the number of those that are known. A point that fails leaves the others
    alone.
    """
    found: dict[int, Outcome] = {}

    def note(index: int, result: Summary | str) -> None:
        point = points[index]
        summary, failure = (None, result) if isinstance(result, str) else (result, "")
        found[index] = Outcome(point, folder / point.folder, summary, failure)
        progress(found[index], len(found))

    run_configs([(point.named, folder / point.folder) for point in points], note, jobs, on)
    return [found[index] for index in range(len(points))]


def run_configs(
    wanted: Sequence[tuple[Config, Path]],
    note: Callable[[int, Summary | str], None] = lambda *_: None,
    jobs: int = 1,
    on: str = "",
    resume: bool = True,
) -> list[Summary | str]:
    """Run configs in their folders and give each one's summary, or why it failed, in their order.

    With `resume`, what is finished in its folder counts, and what was stopped there goes on. `note` is told of each as
    it ends.
    """
    found: dict[int, Summary | str] = {}

    def tell(index: int, result: Summary | str) -> None:
        found[index] = result
        note(index, result)

    missing: dict[int, Wanted] = {}
    for index, (config, folder) in enumerate(wanted):
        if resume and is_finished(folder, config):
            tell(index, read_run(folder).summary)
        else:
            missing[index] = (config, folder, resume and (folder / "config.toml").exists())
    numbers, runs = list(missing), list(missing.values())
    for index, result in (run_on_ray(on, runs) if on else _in_processes(runs, jobs)) if runs else ():
        tell(numbers[index], result)
    return [found[index] for index in range(len(wanted))]


def _in_processes(wanted: Sequence[Wanted], jobs: int) -> Iterator[tuple[int, Summary | str]]:
    # A fresh process each: torch's threads do not survive a fork.
    executor = ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {executor.submit(_run, *one): index for index, one in enumerate(wanted)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        executor.shutdown(cancel_futures=True)


def _run(config: Config, folder: Path, resume: bool) -> Summary | str:
    """One run; the reason, if it fails."""
    try:
        return run_simulated(config, folder, resume=resume)
    except ForeseedError as error:
        return str(error)

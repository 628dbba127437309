"""Running the points of a sweep: several at a time, each in a process of its own, none twice."""

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
) -> list[Summary | str]:
    """Run configs in their folders and give each one's summary, or why it failed, in their order.

    What is finished in its folder counts, and what was stopped there goes on (on Ray it begins again). `note` is told
    of each as it ends.
    """
    found: dict[int, Summary | str] = {}
    missing = []
    for index, (config, folder) in enumerate(wanted):
        if is_finished(folder, config):
            found[index] = read_run(folder).summary
            note(index, found[index])
        else:
            missing.append(index)
    for index, result in _on_ray(wanted, missing, on) if on else _in_processes(wanted, missing, jobs):
        found[index] = result
        note(index, result)
    return [found[index] for index in range(len(wanted))]


_Results = Iterator[tuple[int, Summary | str]]


def _in_processes(wanted: Sequence[tuple[Config, Path]], missing: Sequence[int], jobs: int) -> _Results:
    # A fresh process each: torch's threads do not survive a fork.
    executor = ProcessPoolExecutor(max(1, min(jobs, len(missing))), mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {executor.submit(_run, *wanted[index]): index for index in missing}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        executor.shutdown(cancel_futures=True)


def _run(config: Config, folder: Path) -> Summary | str:
    """One run; the reason, if it fails."""
    try:
        return run_simulated(config, folder, resume=(folder / "config.toml").exists())
    except ForeseedError as error:
        return str(error)


def _on_ray(wanted: Sequence[tuple[Config, Path]], missing: Sequence[int], on: str) -> _Results:
    """Each a task on one core of some node; its folder comes back when it is finished."""
    from foreseed.simulate.on_ray import connect, run_whole, unpack

    ray = connect(on)
    task = ray.remote(num_cpus=1, max_retries=-1)(run_whole)
    futures = {task.remote(wanted[index][0].with_({"workers": 1})): index for index in missing}
    waiting = list(futures)
    while waiting:
        (done, *_), waiting = ray.wait(waiting)
        index, packed = futures[done], ray.get(done)
        if not isinstance(packed, str):
            unpack(packed, wanted[index][1])
            packed = read_run(wanted[index][1]).summary
        yield index, packed

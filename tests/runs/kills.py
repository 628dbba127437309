"""A run in a process of its own, to be killed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

from foreseed.config import Config
from foreseed.simulate import run_simulated
from tests.simulate.small import leave_out_the_slow

# Each process is forked from one that has loaded foreseed, and has done nothing else yet.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["foreseed.simulate"])


def go_on(config: Config, folder: Path) -> None:
    """What a user does who finds a run folder: resume it, or start if nothing has been started."""
    run_simulated(config, folder, resume=(folder / "config.toml").exists())


def killed_often(config: Config, folder: Path, after: Sequence[int], random: Random) -> list[int]:
    """Kill the run a moment after it has come to so many rounds, one process after the other, then let it finish.

    Returns how many lines of metrics each of the killed left behind.
    """
    left = []
    for rounds in after:
        process = _start(config, folder)
        while process.is_alive() and _lines(folder) < rounds:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.join()
        process.close()
        left.append(_lines(folder))
    last = _start(config, folder)
    last.join(300)
    assert last.exitcode == 0
    last.close()
    return left


def _start(config: Config, folder: Path) -> BaseProcess:
    process = _PROCESSES.Process(target=_child, args=(config, folder))
    process.start()
    return process


def _child(config: Config, folder: Path) -> None:
    leave_out_the_slow(setattr)
    go_on(config, folder)


def _lines(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

"""Contenders take turns, and their best slice counts."""

from __future__ import annotations

import time

import pytest
import torch

from foreseed.bench.measure import Setup, allowed_cores, fastest, gemm, in_threads, interleaved, parse_threads, pinned
from foreseed.engine import ForeseedError


def _sleeper(seconds: float, log: list[str], name: str, step: int = 1) -> Setup:
    def run(units: int) -> None:
        assert units % step == 0
        log.append(name)
        time.sleep(seconds * units)

    return Setup(name, run, step)


def test_contenders_take_turns() -> None:
    log: list[str] = []
    interleaved({"a": _sleeper(1e-3, log, "a"), "b": _sleeper(1e-3, log, "b", step=2)}, seconds=0.01)
    assert len(log) >= 8  # one trial each, then at least three rounds
    assert log == ["a", "b"] * (len(log) // 2)


def test_the_best_slice_counts() -> None:
    pauses = iter([0.05, 0.05, 0.001, 0.05])
    way = Setup("uneven", lambda _: time.sleep(next(pauses, 0.05)))
    assert interleaved({"uneven": way}, seconds=0.01)["uneven"] > 100


def test_the_fastest_setting_is_chosen() -> None:
    log: list[str] = []
    ways = [_sleeper(0.004, log, "slow"), _sleeper(0.001, log, "fast"), _sleeper(0.004, log, "slow too")]
    assert fastest(iter(ways)).settings == "fast"


def test_copies_in_threads_share_the_work() -> None:
    done: list[int] = []
    way = in_threads(lambda: Setup("some", done.append, step=3), allowed_cores()[:1] * 2)
    way.run(12)
    assert way.step == 6
    assert done == [6, 6]


def test_pinning_is_undone() -> None:
    cores, threads = allowed_cores(), torch.get_num_threads()
    with pinned(1) as chosen:
        assert allowed_cores() == chosen == cores[:1]
        assert torch.get_num_threads() == 1
    assert (allowed_cores(), torch.get_num_threads()) == (cores, threads)


def test_gemm_counts_its_multiplications() -> None:
    way, gmacs = gemm(1)
    way.run(1)
    assert gmacs == pytest.approx(1536**3 / 1e9)


def test_thread_numbers_are_parsed() -> None:
    assert parse_threads("1") == [1]
    assert parse_threads(None) == [1, 2][: len(allowed_cores())]


@pytest.mark.parametrize("text", ["0", "one", "1,", "-1", "4096"])
def test_thread_numbers_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ForeseedError, match=f"threads '{text}': expected numbers from 1 to"):
        parse_threads(text)

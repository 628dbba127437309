"""Contenders take turns, and their best slice counts."""

from __future__ import annotations

import pytest
import torch

from foreseed.bench import measure
from foreseed.bench.measure import Setup, allowed_cores, fastest, gemm, in_threads, interleaved, parse_threads, pinned
from foreseed.engine import ForeseedError


class Clock:
    """A clock that only work moves on: how long a machine takes for it does not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 0.0, list[str]()
        monkeypatch.setattr(measure, "perf_counter", lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def worker(self, seconds: float, name: str, step: int = 1) -> Setup:
        def run(units: int) -> None:
            assert units % step == 0
            self.log.append(name)
            self.work(seconds * units)

        return Setup(name, run, step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_contenders_take_turns(clock: Clock) -> None:
    rates = interleaved({"a": clock.worker(1e-3, "a"), "b": clock.worker(1e-3, "b", step=2)}, seconds=0.01)
    assert rates == pytest.approx({"a": 1000, "b": 1000})
    assert len(clock.log) >= 8  # one trial each, then at least three rounds
    assert clock.log == ["a", "b"] * (len(clock.log) // 2)


def test_the_best_slice_counts(clock: Clock) -> None:
    pauses = iter([0.05, 0.05, 0.001, 0.05])
    way = Setup("uneven", lambda _: clock.work(next(pauses, 0.05)))
    assert interleaved({"uneven": way}, seconds=0.01)["uneven"] == pytest.approx(1000)


def test_the_fastest_setting_is_chosen(clock: Clock) -> None:
    ways = [clock.worker(0.004, "slow"), clock.worker(0.001, "fast"), clock.worker(0.004, "slow too")]
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

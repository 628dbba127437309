"""How wide the engines of a run are: as the second cache of the machine allows, down to a least width."""

from __future__ import annotations

import pytest

from foreseed.bench.cases import make_case
from foreseed.engine import Program
from foreseed.methods import workers
from foreseed.methods.workers import fitting_engine


@pytest.fixture(scope="module")
def program() -> Program:
    return make_case("lenet5-90", 1).program


def widths(monkeypatch: pytest.MonkeyPatch, program: Program, batch: int | None = None) -> list[tuple[int, int]]:
    found = []
    for kilobytes in (1, 512, 1024, 1 << 20):
        monkeypatch.setattr(workers, "second_cache_bytes", lambda size=kilobytes: size * 1024)
        engine = fitting_engine(program, batch)
        found.append((engine.batch, engine.directions))
    return found


def test_a_larger_cache_has_more_side_by_side(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    found = widths(monkeypatch, program)
    assert (found[0], found[-1]) == ((16, 1), (32, 8))
    assert found == sorted(found)


def test_a_batch_that_is_given_stays(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    assert [batch for batch, _ in widths(monkeypatch, program, 24)] == [24] * 4


def test_the_cache_is_known_or_taken_for_a_common_one() -> None:
    assert 64 * 1024 <= workers.second_cache_bytes() <= 1 << 30

"""`foreseed bench liars`: absurd lies are refused by their reason, and only without a rule do they end a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreseed.bench.liars import LIES, bench_liars
from tests.simulate.small import TINY, write_bars

REFUSED = {"huge": "differences", "base loss 1e30": "base loss", "NaN": "not finite"}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz", train=400)


def short(bars: Path, lies: list[str], *overrides: str) -> dict[str, Any]:
    settings = [
        f"data.set={bars}", f"model.name={TINY}", "data.min_size=4", "prune.iterations=2", "prune.density=0.3",
        "train.k=20", "workers=1",
    ]  # fmt: skip
    return bench_liars(12, [0], [*settings, *overrides], lies)


@pytest.mark.parametrize("bits", [1, 32])
def test_what_cannot_be_true_is_refused_and_runs_are_those_of_the_others_alone(bars: Path, bits: int) -> None:
    result = short(bars, list(REFUSED), f"train.bits={bits}")
    for row in result["rows"]:
        assert set(row["refused"]) == {REFUSED[row["lie"]]}
        assert row["refused"][REFUSED[row["lie"]]] >= 12 * row["tenths"] / 2
    for tenths in (1, 2, 4):
        assert len({row["accuracy"] for row in result["rows"] if row["tenths"] == tenths}) == 1


def test_lies_that_may_be_true_are_taken(bars: Path) -> None:
    others = [lie for lie in LIES if lie not in REFUSED]
    for bits in (1, 32):
        result = short(bars, others, f"train.bits={bits}")
        for row in result["rows"]:
            # So many samples are plausible until the first round has shown how many there are.
            told = {"pulls against the others"} if row["lie"] == "sign-flipped" else {"samples"}
            assert set(row["refused"]) <= told
        assert len({row["accuracy"] for row in result["rows"]} | set(result["honest"])) > 2


def test_without_a_rule_one_liar_ends_the_run(bars: Path) -> None:
    result = short(bars, ["huge"], "train.robust=none", "train.clip=0")
    assert all(row["accuracy"] is None and "too large" in row["ended"] for row in result["rows"])


def test_those_who_turn_every_sign_round_are_left_out_by_and_by(bars: Path) -> None:
    result = short(bars, ["sign-flipped"], "train.k=400")
    left_out = {row["tenths"]: row["refused"].get("pulls against the others", 0) for row in result["rows"]}
    # Two of twenty devices lie, or four; ten are asked in each of twelve rounds.
    assert left_out[1] >= 2
    assert left_out[2] >= 2
    assert not short(bars, ["sign-flipped"], "train.k=400", "train.robust=none")["rows"][0]["refused"]

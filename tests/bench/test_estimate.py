"""`foreseed bench estimate`: what is measured is what theory says, within what chance allows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.bench.estimate import Sizes, bench_estimate
from foreseed.bench.estimate_figure import draw
from foreseed.bench.estimate_law import law, noise_scale

TINY = Sizes(
    ks=(100,), dense_ks=(20,), spreads=(1, 8), bits=(1, 2, 8), densities=(0.05,), k=160, passes=20, code_bytes=25,
    prune_iterations=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bench_estimate(12, TINY)


@pytest.mark.slow
def test_measured_errors_and_cosines_are_the_laws(result: dict[str, Any]) -> None:
    assert {row["sweep"] for row in result["rows"]} == {"k", "spread", "bits", "density"}
    for row in result["rows"]:
        # Twelve draws: five standard errors leave room for the spread of the standard error itself. The terms of
        # order 1 / K that the laws leave out are less than 2 % where K is least.
        assert row["error"] == pytest.approx(row["error_law"], abs=5 * row["error_se"] + 0.02 * row["error_law"]), row
        assert abs(row["cosine"] - row["cosine_law"]) < 5 * row["cosine_se"] + 0.02 * row["cosine_law"], row
        assert row["error_se"] < 0.3 * row["error"]


@pytest.mark.slow
def test_every_gradient_is_described(result: dict[str, Any]) -> None:
    assert len(result["gradients"]) == 5
    for gradient in result["gradients"]:
        assert gradient["gradient_square"] > 0
        assert gradient["rho"] > 0


@pytest.mark.slow
def test_figure_comes_with_its_numbers(result: dict[str, Any], tmp_path: Path) -> None:
    draw(result["rows"], tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"estimate.svg", "estimate.png", "estimate.csv"}
    with (tmp_path / "new" / "estimate.csv").open(newline="") as file:
        assert [float(row["error"]) for row in csv.DictReader(file)] == [row["error"] for row in result["rows"]]


def test_law_of_one_gradient() -> None:
    g = np.random.default_rng(0).normal(size=1000)
    assert law(g[None], g, 100, 32, "gaussian").error == pytest.approx(1001 / 100)
    assert law(g[None], g, 100, 32, "rademacher").error == pytest.approx(999 / 100)
    assert law(g[None], g, 100, 32, "gaussian").cosine == pytest.approx((100 / 1101) ** 0.5)
    assert law(g[None], g, 100, 1, "gaussian").error == pytest.approx(np.pi / 2 * 10, rel=1e-3)


def test_law_of_spread_follows_from_one_number() -> None:
    rng = np.random.default_rng(0)
    images = 0.1 + rng.normal(size=(240, 500))
    g, rho = images.mean(0), noise_scale(images)
    for spread in (1, 4, 24, 240):
        parts = images.reshape(spread, -1, 500).mean(1)
        expected = 501 / 480 * (1 + (spread - 1) * rho)
        assert law(parts, g, 480, 32, "gaussian").error == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("k", [50, 800])
def test_law_of_levels_knows_the_largest_slope(k: int) -> None:
    rng, parts = np.random.default_rng(0), np.diag([1.0, 3.0])
    slopes = np.abs(rng.normal(size=(4000, k))) * np.tile([1.0, 3.0], k // 2)
    found = [law(parts, parts.mean(0), k, bits, "gaussian").error for bits in (2, 32)]
    rounding = (found[0] - found[1]) * float((parts.mean(0) ** 2).sum()) * k / 2 * 6 * 9 / 4
    assert rounding == pytest.approx((slopes.max(1) ** 2).mean(), rel=0.03)

"""`foreseed bench signs` finds what is true: the shorter the probe, the more signs are those of the slopes."""

from __future__ import annotations

import pytest

from foreseed.bench.signs import bench_signs


@pytest.mark.parametrize("central", [False, True])
def test_short_probes_have_the_signs_of_the_slopes(central: bool) -> None:
    result = bench_signs(40, central, ["lenet5"], [1e-1, 1e-4])
    long, short = (row["agree"] for row in result["rows"])
    assert 0.4 < long < short
    assert short > 0.95
    assert result["directions"] == 80

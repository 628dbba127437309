"""`foreseed bench signs` finds what is true: long probes and very short ones lose signs, those between keep them."""

from __future__ import annotations

from foreseed.bench.signs import bench_signs


def test_signs_of_differences_are_nearly_always_those_of_the_slopes() -> None:
    result = bench_signs(40, ["lenet5"], [1e-3, 1e-7])
    shares = {(row["difference"], row["sigma"]): row["agree"] for row in result["rows"]}
    assert shares["forward", 1e-3] > 0.9
    assert shares["central", 1e-3] > 0.95
    assert max(shares["forward", 1e-7], shares["central", 1e-7]) < 0.85  # rounding decides
    assert result["directions"] == 80

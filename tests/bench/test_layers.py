"""`foreseed bench engine --layers`: every layer has its row, and the rows make up the whole."""

from __future__ import annotations

import json

import pytest

from foreseed.bench.cases import make_case
from foreseed.bench.layers import BESIDE, bench_layers
from foreseed.engine import ForeseedError


@pytest.mark.parametrize("name", ["lenet5-90", "resnet20-90"])
def test_every_layer_has_a_row_and_the_rows_make_up_the_whole(name: str) -> None:
    result = bench_layers([name], seconds=0.01, images=20)
    assert json.loads(json.dumps(result)) == result
    (case,) = result["cases"]
    layers = make_case(name, 1).program.layers()
    assert [row["layer"] for row in case["rows"]] == [*(layer.name for layer in layers), *BESIDE]
    assert [row["macs"] for row in case["rows"]] == [*(20 * layer.macs for layer in layers), *[0] * len(BESIDE)]
    assert all(row["ms"] > 0 for row in case["rows"] if row["macs"])
    assert sum(row["share_of_time"] for row in case["rows"]) == pytest.approx(1)
    assert sum(row["ms"] for row in case["rows"]) == pytest.approx(case["ms"])
    assert case["gemm_share"] == pytest.approx(
        20 * sum(layer.macs for layer in layers) / case["ms"] / 1e6 / case["gemm_gmac_per_s"]
    )


def test_pooling_is_told_apart_from_its_conv() -> None:
    (case,) = bench_layers(["lenet5-90"], seconds=0.01, images=20)["cases"]
    beside = {row["layer"]: row["ms"] for row in case["rows"]}
    assert all(beside[name] > 0 for name in BESIDE)


def test_seconds_must_be_positive() -> None:
    with pytest.raises(ForeseedError, match="seconds 0: expected a positive number"):
        bench_layers(["lenet5-90"], seconds=0)

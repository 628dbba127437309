"""The benchmarks' cases are what they are said to be."""

from __future__ import annotations

import pytest
import torch

from foreseed.bench.cases import CASES, make_case, parse_names
from foreseed.engine import ForeseedError


def test_lenet5_is_the_classic_one() -> None:
    case = make_case("lenet5-dense", images=1)
    assert (case.program.n_live, case.program.macs) == (62_006, 651_720)


@pytest.mark.parametrize("name", ["lenet5-90", "resnet20-90"])
def test_ninety_percent_of_the_weights_are_pruned(name: str) -> None:
    layers = make_case(name, images=1).program.layers()
    density = sum(layer.n_weights for layer in layers) / sum(layer.n_dense for layer in layers)
    assert density == pytest.approx(0.1, abs=5e-4)


def test_resnet20_is_densest_where_it_is_small() -> None:
    layers = {layer.name: layer.density for layer in make_case("resnet20-90", images=1).program.layers()}
    assert layers["conv"] == pytest.approx(0.6, abs=2e-3)
    assert layers["stage3.2.conv2"] == pytest.approx(0.04, abs=2e-3)


def test_a_case_is_the_same_every_time() -> None:
    one, other = make_case("lenet5-90", images=2), make_case("lenet5-90", images=2)
    assert one.program.bytes == other.program.bytes
    assert one.values == other.values
    assert bytes(one.samples.data) == bytes(other.samples.data)


def test_dense_parameters_are_zero_where_weights_are_pruned() -> None:
    case = make_case("lenet5-90", images=1)
    dense, mask = case.dense(case.values), case.dense_mask()
    assert int(mask.sum()) == case.program.n_live
    assert torch.equal(dense * mask, dense)


def test_case_names_are_parsed() -> None:
    assert parse_names(None) == list(CASES)
    assert parse_names("lenet5-90, resnet20-dense") == ["lenet5-90", "resnet20-dense"]


def test_an_unknown_case_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ForeseedError, match=r"case 'resnet-90'.*did you mean 'resnet20-90'"):
        parse_names("lenet5-90,resnet-90")

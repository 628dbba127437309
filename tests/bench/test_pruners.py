"""Pruners at high compression: the order that SynFlow's authors published, on a smaller net."""

from __future__ import annotations

import pytest
import torch

from foreseed.bench import pruners
from foreseed.engine import ForeseedError
from foreseed.prune import prunable


@pytest.mark.slow
def test_the_order_at_high_compression_is_the_published_one() -> None:
    names = ["synflow", "snip", "random", "magnitude"]
    said: list[str] = []
    threads = torch.get_num_threads()
    result = pruners.bench_pruners(names, [0.01], [0, 1], epochs=5, progress=said.append)
    assert torch.get_num_threads() == threads
    assert said[:2] == ["synflow, density 0.01, seed 0", "synflow, density 0.01, seed 1"]
    means = {row["pruner"]: row["mean"] for row in result["rows"]}
    assert means["synflow"] > means["snip"] > means["random"] > means["magnitude"]
    assert means["synflow"] > 0.9
    assert means["magnitude"] < 0.2, "one layer has a single weight, and nothing passes"
    for row in result["rows"]:
        assert row["mean"] == pytest.approx(sum(row["accuracies"]) / 2)


def test_what_is_pruned_stays_so_in_training() -> None:
    train, test = pruners._digits()
    model = pruners.vgg(0)
    mask = pruners._mask(model, "erk", 0.05, 0, train)
    few = train[0][:64], train[1][:64]
    trained = pruners._trained(model, mask, 0, 2, few)
    for name, layer in prunable(trained).items():
        assert not layer.weight[~mask[name]].any()
        assert not torch.equal(layer.weight[mask[name]], prunable(model)[name].weight[mask[name]])
    assert 0 <= pruners._accuracy(trained, test) <= 1


def test_pruners_and_densities_are_named() -> None:
    assert pruners.parse_pruners("snip,erk") == ["snip", "erk"]
    with pytest.raises(ForeseedError, match="no 'snap'; expected some of ntk-rand,"):
        pruners.parse_pruners("snip,snap")
    assert pruners.parse_densities("0.1,1") == [0.1, 1.0]
    for wrong in ("", "0", "a,b", "0.1,2"):
        with pytest.raises(ForeseedError, match="expected shares above 0 and at most 1"):
            pruners.parse_densities(wrong)

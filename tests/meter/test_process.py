"""`foreseed.meter.process`: whole processes, measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foreseed import models
from foreseed.engine.program import Program
from foreseed.meter import MeterError, planned_bp_bytes, process_peak_bytes
from foreseed.meter.backprop_device import logits
from tests.models.agreement import random_mask, scramble

MEBI = 1 << 20
SHAPE = (3, 32, 32)


def pruned_lenet() -> Program:
    model = models.build("lenet5", SHAPE, 10)
    return models.compile(model, random_mask(model, 0.1))[0]


def test_forward_device_stays_small() -> None:
    peak = process_peak_bytes("bp-free", pruned_lenet())
    assert peak is not None
    assert 4 * MEBI < peak < 25 * MEBI


@pytest.mark.slow
def test_backpropagation_is_measured_with_what_it_holds() -> None:
    model = models.build("resnet20", SHAPE, 10, norm="batch")
    program, _ = models.compile(model)
    few, many = (process_peak_bytes("bp", program, batch) for batch in (2, 64))
    assert few is not None
    assert many is not None
    grown = planned_bp_bytes(program, 64, True).total - planned_bp_bytes(program, 2, True).total
    assert many - few > 0.9 * grown
    assert few > 10 * planned_bp_bytes(program, 2, True).total


def test_process_that_fails_is_reported() -> None:
    damaged = pruned_lenet()
    damaged.bytes = damaged.bytes[:-1]
    with pytest.raises(MeterError, match=r"was to be measured, failed: .*ProgramError.*truncated"):
        process_peak_bytes("bp-free", damaged)


def test_process_of_an_unknown_kind_is_refused() -> None:
    unknown: Any = "bp-some"
    with pytest.raises(MeterError, match="'bp-some' cannot be measured; expected 'bp-free' or 'bp'"):
        process_peak_bytes(unknown, pruned_lenet())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet5", {"activation": "hardswish"}),
        ("resnet20", {"norm": "batch", "activation": "relu"}),
        ("resnet20", {"norm": "group", "activation": "hardswish"}),
    ],
)
def test_measured_model_is_the_programs(name: str, options: dict[str, Any]) -> None:
    model = scramble(models.build(name, SHAPE, 10, **options)).train()
    program, _ = models.compile(model)
    images = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    net = [_own(model, layer.name) for layer in program.layers()]
    torch.testing.assert_close(logits(program, net, images), model(images), rtol=1e-3, atol=1e-3)


def _own(model: nn.Module, layer: str) -> list[torch.Tensor]:
    """The parameters of a layer, if it is a module."""
    modules = dict(model.named_modules())
    return list(modules[layer].parameters()) if layer in modules else []


def test_a_device_process_holds_what_a_method_makes_it_hold() -> None:
    plain, more = (process_peak_bytes("bp-free", pruned_lenet(), held=held) for held in (0, 20_000_000))
    assert plain is not None
    assert more is not None
    assert 18_000_000 < more - plain < 22_000_000

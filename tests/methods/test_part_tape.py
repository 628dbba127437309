"""Gradients of many parts from one backward pass are those of a pass for each part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foreseed.methods.part_tape import PartTape

PARTS = [(0, 1), (1, 4), (5, 2), (7, 6)]


def odd() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.Hardswish(), nn.Conv2d(4, 6, (1, 3), groups=2),
        nn.ReLU(), nn.Conv2d(6, 3, 2, dilation=2), nn.Flatten(), nn.LazyLinear(5, bias=False), nn.Hardswish(),
        nn.Linear(5, 3),
    )  # fmt: skip


def twice() -> nn.Module:
    shared = nn.Conv2d(4, 4, 3, padding=1)
    layers = [nn.Conv2d(2, 4, 3), shared, nn.SiLU(), nn.MaxPool2d(2), shared, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 3))


@pytest.mark.parametrize("net", [odd, twice])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_part_has_its_own_gradient(layout: Any, net: Any) -> None:
    torch.manual_seed(0)
    model, images = net(), torch.randn(13, 2, 12, 11).contiguous(memory_format=layout)
    model(images)  # gives the lazy layer its size
    labels = torch.arange(13) % 3
    tape = PartTape.of(model)
    assert tape is not None
    with tape:
        losses = F.cross_entropy(model(images), labels, reduction="none")
        found = tape.gradients(losses, PARTS)
    assert set(found) == set(model.parameters())
    for row, (first, count) in enumerate(PARTS):
        model.zero_grad()
        F.cross_entropy(model(images[first : first + count]), labels[first : first + count]).backward()
        for parameter, gradients in found.items():
            assert parameter.grad is not None
            expected = parameter.grad.reshape(-1).numpy()
            np.testing.assert_allclose(gradients[row].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_a_tape_that_is_closed_leaves_nothing_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    tape = PartTape.of(model)
    assert tape is not None
    with tape:
        assert model[0]._forward_hooks
    assert not model[0]._forward_hooks


UNKNOWN = [
    nn.GroupNorm(1, 2), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding="same"),
    nn.Conv2d(2, 2, 3, padding_mode="reflect"),
]  # fmt: skip


@pytest.mark.parametrize("layer", UNKNOWN)
def test_models_that_it_knows_no_formula_for_have_none(layer: nn.Module) -> None:
    assert PartTape.of(nn.Sequential(nn.Conv2d(1, 2, 3), layer)) is None

"""Convolutions in pieces are torch's own."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from foreseed.prune import convolution
from foreseed.prune.convolution import FewImagesAtATime

OPTIONS = [*itertools.product((1, (2, 1)), (0, (2, 3)), (1, 2), (1, 2)), (1, "same", 2, 1)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients_are_those_of_the_whole(bias, options, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(1)
    images, weight, offset = (
        torch.randn(shape, generator=generator, dtype=torch.double, requires_grad=True)
        for shape in ((7, 4, 9, 8), (6, 4 // options[3], 3, 2), (6,))
    )
    sources = (images, weight, offset) if bias else (images, weight)
    whole = functional.conv2d(images, weight, offset if bias else None, *options)
    direction = torch.randn(whole.shape, generator=generator, dtype=torch.double)
    gradients = torch.autograd.grad(whole, sources, direction)
    monkeypatch.setattr(convolution, "_PATCHES_BYTES", 3 * 8 * 9 * 8 * weight[0].numel())  # pieces of 3, 3 and 1
    with FewImagesAtATime():
        pieces = functional.conv2d(images, weight, offset if bias else None, *options)
    assert type(pieces.grad_fn).__name__ == "CatBackward0"
    assert torch.allclose(pieces, whole, rtol=1e-12, atol=1e-12)
    for got, expected in zip(torch.autograd.grad(pieces, sources, direction), gradients, strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("images", "dtype"), [((7, 4, 9, 8), torch.float), ((4, 9, 8), torch.double), ((0, 4, 9, 8), torch.double)]
)
def test_what_cannot_gain_is_left_to_torch(images, dtype, monkeypatch) -> None:
    monkeypatch.setattr(convolution, "_PATCHES_BYTES", 1)
    layer, x = nn.Conv2d(4, 6, 3).to(dtype), torch.ones(images, dtype=dtype)
    with FewImagesAtATime():
        got = layer(x)
    assert type(got.grad_fn).__name__ != "CatBackward0"
    assert torch.equal(got, layer(x))

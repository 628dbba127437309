"""SWAT: which weights and activations go where, against explicit loops and the authors' own selection."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from foreseed.methods.swat import SparseTraining, largest
from foreseed.prune import prunable


def kept(x: np.ndarray, keep: int) -> np.ndarray:
    """0 in place of all but the largest, by sorting."""
    order = np.argsort(-np.abs(x), axis=None, kind="stable")
    out = np.zeros(x.size)
    out[order[:keep]] = x.ravel()[order[:keep]]
    return out.reshape(x.shape)


def test_a_convolution_is_that_of_the_largest_weights_and_learns_from_the_largest_activations() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 3, 3, stride=2, padding=1), torch.randn(2, 2, 5, 5, requires_grad=True)
    with SparseTraining(layer, {"": 11}):
        out = layer(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)

    some_w, images, above = kept(layer.weight.detach().numpy(), 11), x.detach().numpy(), upstream.numpy()
    around = ((0, 0), (0, 0), (1, 1), (1, 1))
    padded, few = np.pad(images, around), np.pad(kept(images, 21), around)  # 11 of 54 weights, so 21 of 100 activations
    made, of_weight, of_input = np.zeros(out.shape), np.zeros(some_w.shape), np.zeros(padded.shape)
    for n, o, i, j in product(*map(range, out.shape)):
        made[n, o, i, j] = layer.bias[o].item()
        for c, u, v in product(range(2), range(3), range(3)):
            at = (n, c, 2 * i + u, 2 * j + v)
            made[n, o, i, j] += some_w[o, c, u, v] * padded[at]
            of_weight[o, c, u, v] += above[n, o, i, j] * few[at]
            of_input[at] += above[n, o, i, j] * some_w[o, c, u, v]
    np.testing.assert_allclose(out.detach(), made, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.weight.grad, of_weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(x.grad, of_input[:, :, 1:-1, 1:-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.bias.grad, above.sum((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_a_linear_layer_by_hand() -> None:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -3.0, 0.5], [2.0, -0.25, -2.5]]))
        layer.bias.copy_(torch.tensor([10.0, 20.0]))
    x = torch.tensor([[1.0, 2.0, -4.0], [0.5, -8.0, 3.0]], requires_grad=True)
    with SparseTraining(layer, {"": 3}):  # -3, 2 and -2.5; of six activations 3: -4, -8 and 3
        out = layer(x)
    out.backward(torch.tensor([[1.0, 10.0], [100.0, 1000.0]]))
    assert out.tolist() == [[4.0, 32.0], [34.0, 13.5]]
    assert x.grad is not None
    assert x.grad.tolist() == [[20.0, -3.0, -25.0], [2000.0, -300.0, -2500.0]]
    assert layer.weight.grad.tolist() == [[0.0, -800.0, 296.0], [0.0, -8000.0, 2960.0]]
    assert layer.bias.grad.tolist() == [101.0, 1010.0]


def test_what_is_kept_is_what_the_authors_code_keeps() -> None:
    """Came out of `drop_nhwc` (a share of 0.4) and `matrix_drop` (0.5) of AamirRaihan/SWAT, ImageNet/UnStructured."""
    images = torch.tensor([0.5, -2.0, 0.1, 0.0, 3.0, -0.2, -0.9, 0.4]).view(2, 1, 2, 2)
    assert largest(images, 4).flatten().tolist() == pytest.approx([0.5, -2.0, 0, 0, 3.0, 0, -0.9, 0])
    weights = torch.tensor([[1.0, -3.0, 0.5], [2.0, -0.1, -2.5]])
    assert largest(weights, 3).tolist() == [[0, -3.0, 0], [2.0, 0, -2.5]]


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-9, 9, width=32)), st.data())
def test_nothing_that_is_left_out_is_larger_than_what_is_kept(x: np.ndarray, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, len(x)))
    few = largest(torch.from_numpy(x), keep).numpy()
    assert ((few == x) | (few == 0)).all()
    assert np.abs(np.sort(np.abs(few))[::-1][:keep] - np.sort(np.abs(x))[::-1][:keep]).max() == 0
    left = np.abs(x[few != x])
    assert not left.size or left.max() < np.abs(x[few == x]).max()


def test_only_layers_that_are_named_are_sparse_and_a_whole_one_is_as_ever() -> None:
    torch.manual_seed(1)
    net, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), torch.randn(5, 8)

    def gradients(names: dict[str, int] | None) -> list[Tensor]:
        net.zero_grad()
        if names is None:
            net(x).square().sum().backward()
        else:
            with SparseTraining(net, names):
                net(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    plain = gradients(None)
    assert all(map(torch.equal, gradients({"0": 48, "2": 24}), plain))
    assert all(map(torch.equal, gradients({}), plain))
    assert not torch.equal(gradients({"2": 12})[2], plain[2])
    assert set(prunable(net)) == {"0.weight", "2.weight"}

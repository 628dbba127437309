"""SynFlow: what flows through a weight when all signs are taken out of a network; no data, no labels, no devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from foreseed.prune.cost import Cost, forward_flops
from foreseed.prune.masks import Mask, prunable
from foreseed.prune.saliency import Saliency, Settings

_ACTIVATIONS = {
    functional.relu, functional.relu6, functional.hardtanh, functional.leaky_relu, functional.hardswish,
    functional.silu, functional.gelu, functional.tanh, torch.relu, torch.relu_, torch.tanh, torch.Tensor.relu,
    torch.Tensor.relu_, torch.Tensor.tanh,
}  # fmt: skip


def synflow(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """|w dR/dw|, where R sums the logits of |weights| for an image of ones. SynFlow (Tanaka et al., NeurIPS 2020).

    arXiv:2006.05467. Biases and norm parameters lose their signs too, and norms are in eval mode, as in its public
    code. Without biases the scores of every layer then add up to R: no layer dies before all others, if a mask is
    found in many small steps (the paper takes 100).
    """
    work = copy.deepcopy(model).double().eval().requires_grad_(False)
    layers = prunable(work)
    for tensor in (*work.parameters(), *work.buffers()):
        tensor.abs_()
    for name, layer in layers.items():
        layer.weight.mul_(mask[name])
    flops = 3 * forward_flops(work, settings.input_shape)
    weights = [layer.weight.requires_grad_() for layer in layers.values()]
    with Linearised():
        flow = work(torch.ones(1, *settings.input_shape, dtype=torch.double)).sum()
    gradients = torch.autograd.grad(flow, weights, materialize_grads=True)
    scores = {name: (w * g).detach().abs() for name, w, g in zip(layers, weights, gradients, strict=True)}
    return Saliency(scores, flow.item(), Cost(server_flops=flops))


class Linearised(TorchFunctionMode):
    """While it is entered, activations pass on what they get, as ReLU does with the positive numbers of SynFlow.

    Norms without statistics of their own scale and shift alone, as an untrained BatchNorm in eval mode does. Gates
    (sigmoids) stay: what they multiply is linear, and they are near one for the large numbers here.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ACTIVATIONS:
            return args[0]
        if func is functional.group_norm:
            return _scaled(args[0].ndim - 2, *args, **kwargs)
        if func is functional.layer_norm:
            return _scaled(0, *args, **kwargs)
        return func(*args, **kwargs)


def _scaled(
    dims: int,
    images: torch.Tensor,
    _: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """What a norm does beside normalising, where the last `dims` dimensions share a channel's scale and shift."""
    scale, shift = (None if one is None else one.reshape(*one.shape, *[1] * dims) for one in (weight, bias))
    images = images if scale is None else images * scale
    return images if shift is None else images + shift

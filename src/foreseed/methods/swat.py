"""SWAT (Raihan and Aamodt, Sparse Weight Activation Training, NeurIPS 2020), unstructured.

Of each layer the weights of the largest magnitude, and no others, go into the forward pass and into the gradient of its
input; of its input the largest activations, by the same share, go into the gradient of its weights. That gradient is
dense, so every weight is trained, and which ones are the largest changes from step to step.

Activations are the largest of a whole minibatch, and all that equal the smallest one kept are kept, as in the authors'
code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foreseed.prune import prunable


class SparseTraining(TorchFunctionMode):
    """While it is entered, a model's convolutions and linear layers are computed and differentiated as SWAT does."""

    def __init__(self, model: nn.Module, kept: Mapping[str, int]) -> None:
        """`kept` weights of each layer, by its name."""
        super().__init__()
        weights = {name.rpartition(".")[0]: layer.weight for name, layer in prunable(model).items()}
        self._kept = {weights[name]: n for name, n in kept.items() if n < weights[name].numel()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.conv2d, F.linear) or len(args) < 3 or args[1] not in self._kept:
            return func(*args, **kwargs)
        activations, weight, bias, *options = args
        kept = self._kept[weight]
        few = largest(activations, ceil(kept / weight.numel() * activations.numel()))
        # Worth 0, but the weights' gradient comes through it, and from nowhere else: what the layer makes is made of a
        # copy of the weights.
        carrier = func(few, weight, None, *options, **kwargs)
        return func(activations, largest(weight, kept), bias, *options, **kwargs) + (carrier - carrier.detach())


@torch.no_grad()
def largest(tensor: Tensor, keep: int) -> Tensor:
    """A copy with 0 in place of all but the entries of the largest magnitude."""
    magnitudes = tensor.abs()
    # NumPy's selection takes a tenth of the time of torch's.
    smallest = np.partition(magnitudes.numpy(), -keep, axis=None)[-keep]
    return torch.where(magnitudes >= float(smallest), tensor, 0.0)

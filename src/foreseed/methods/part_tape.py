"""Gradients of many small parts of a batch from one backward pass.

A backward pass a part spends most of its time on calls once parts are a few images. Here one pass over all images finds
how the loss changes with every layer's output, and each part's gradient follows from its own rows of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class PartTape:
    """What passes through a model's layers while the tape is open (`with tape:`)."""

    def __init__(self, layers: Sequence[nn.Conv2d | nn.Linear]) -> None:
        self._layers = layers
        self._passes: list[tuple[nn.Conv2d | nn.Linear, Tensor, Tensor]] = []
        """Every call of a layer, with what it was given and what it made."""
        self._hooks: list[Any] = []

    @staticmethod
    def of(model: nn.Module) -> PartTape | None:
        """A tape for a model whose parameters all belong to convolutions and linear layers; None for another one.

        A norm's gradient would take its own formula here, and zero padding is the only one that is written down.
        """
        owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
        layers = [module for module in owners if isinstance(module, nn.Conv2d | nn.Linear)]
        plain = all(layer.padding_mode == "zeros" for layer in layers if isinstance(layer, nn.Conv2d))
        numeric = all(not isinstance(layer.padding, str) for layer in layers if isinstance(layer, nn.Conv2d))
        return PartTape(layers) if len(layers) == len(owners) and plain and numeric else None

    def __enter__(self) -> None:
        self._hooks = [layer.register_forward_hook(self._note) for layer in self._layers]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._passes = [], []

    def _note(self, layer: Any, given: tuple[Tensor, ...], out: Tensor) -> None:
        self._passes.append((layer, given[0].detach(), out))

    def gradients(self, losses: Tensor, parts: Sequence[tuple[int, int]]) -> dict[Tensor, Tensor]:
        """Gradients of the mean loss of each part (first image, count): for each parameter, [part, its numbers]."""
        changes = torch.autograd.grad(losses.sum(), [out for _, _, out in self._passes])
        counts = torch.tensor([[float(count)] for _, count in parts])
        found: dict[Tensor, Tensor] = {}

        def note(parameter: Tensor, gradients: list[Tensor]) -> None:
            """A layer that is called twice has the sum of both gradients."""
            of_call = torch.stack(gradients) / counts
            found[parameter] = found[parameter] + of_call if parameter in found else of_call

        with torch.no_grad():
            for (layer, given, _), change in zip(self._passes, changes, strict=True):
                pieces = [(change[at : at + count], given[at : at + count]) for at, count in parts]
                note(layer.weight, [_weight_gradient(layer, *piece).reshape(-1) for piece in pieces])
                if layer.bias is not None:
                    note(layer.bias, [_bias_gradient(piece) for piece, _ in pieces])
        return found


def _weight_gradient(layer: nn.Conv2d | nn.Linear, change: Tensor, given: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return change.reshape(-1, layer.out_features).T @ given.reshape(-1, layer.in_features)
    result: Tensor = torch.ops.aten.convolution_backward(
        change, given, layer.weight, None, layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups,
        [False, True, False],
    )[1]  # fmt: skip
    return result


def _bias_gradient(change: Tensor) -> Tensor:
    return change.sum((0, 2, 3)) if change.dim() == 4 else change.reshape(-1, change.shape[-1]).sum(0)

"""What pruning costs, and who pays."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import nn

from foreseed.prune.errors import PruneError
from foreseed.prune.masks import prunable


@dataclass(frozen=True)
class Cost:
    """What a pruning cost the server and each device that took part.

    FLOPs are 2 a multiply-accumulate of *dense* layers, a backward pass counting as two forward ones: autograd
    multiplies whole tensors, masked or not.
    """

    server_flops: int = 0
    device_flops: tuple[int, ...] = ()
    """Device by device, in the order of the data given."""
    upload_bytes: int = 0
    """Sent by each device."""
    download_bytes: int = 0
    """Received by each device."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.server_flops + other.server_flops,
            tuple(a + b for a, b in zip_longest(self.device_flops, other.device_flops, fillvalue=0)),
            self.upload_bytes + other.upload_bytes,
            self.download_bytes + other.download_bytes,
        )


def macs_per_weight(model: nn.Module, input_shape: tuple[int, ...]) -> dict[str, int]:
    """How often each weight of a Conv2d or Linear layer works for one input, by weight name; 0 where it is not used.

    Refuses an input that the model cannot take. The model must be in eval mode, or its statistics would move.
    """
    layers = prunable(model)
    names, macs = {layer: name for name, layer in layers.items()}, dict.fromkeys(layers, 0)

    def count(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        # Every weight works once for each place of the output map; a linear layer has a single place.
        macs[names[layer]] += output.numel() // layer.weight.shape[0]

    hooks = [layer.register_forward_hook(count) for layer in layers.values()]
    try:
        with torch.no_grad():
            model(torch.zeros(1, *input_shape, dtype=next(model.parameters()).dtype))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise PruneError(
            f"the model does not take inputs of shape {tuple(input_shape)}: {reason}; "
            "give the input_shape that it was made for"
        ) from None
    finally:
        for hook in hooks:
            hook.remove()
    return macs


def forward_flops(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """FLOPs of the dense Conv2d and Linear layers for one input to a model in eval mode."""
    layers = prunable(model)
    return sum(2 * layers[name].weight.numel() * macs for name, macs in macs_per_weight(model, input_shape).items())

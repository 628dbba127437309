"""The model that experiment.toml trains. Change it, and run the experiment again."""

from math import ceil

from torch import nn


def make(in_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Make a small network for images of `in_shape` (channels, height, width) with a logit for each class.

    Use what compiles (docs/format.md has every layer): convolutions, linear layers, ReLU or Hardswish, pooling,
    BatchNorm or GroupNorm, and sums of branches. No softmax at the end: the loss has it.
    """
    channels, height, width = in_shape
    net = nn.Sequential(
        nn.Conv2d(channels, 8, 5, stride=2, padding=2),
        nn.Hardswish(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(16 * ceil(height / 4) * ceil(width / 4), 48),
        nn.Hardswish(),
        nn.Linear(48, classes),
    )
    # PyTorch's own initial weights make the signal smaller from layer to layer; these keep its size.
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net

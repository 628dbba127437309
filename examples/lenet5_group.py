"""LeNet-5 with a GroupNorm of two groups behind each conv, as a model of one's own.

In this folder: foreseed run cifar10-lenet5-best model.name=lenet5_group:lenet5_group
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from foreseed.models import lenet5


def lenet5_group(in_shape: Sequence[int], classes: int, **options: Any) -> nn.Module:
    """Make it of the shipped LeNet-5; `options` are its own, such as `activation` and `seed`."""
    net = nn.Sequential()
    for name, module in lenet5(tuple(in_shape), classes, **options).named_children():
        net.add_module(name, module)
        if isinstance(module, nn.Conv2d):
            net.add_module(name.replace("conv", "norm"), nn.GroupNorm(2, module.out_channels))
    return net

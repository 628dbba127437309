"""Parts of small torch models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

SMALL = (2, 8, 8)


class Net(nn.Module):
    """Layers by name, and a forward given as a function of (self, x)."""

    def __init__(self, forward: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.body = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def head(channels: int = 4) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


def conv(n_in: int = 2, n_out: int = 4) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, padding=1)

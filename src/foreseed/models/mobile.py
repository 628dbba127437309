"""Small nets that people bring to small devices, as plain torch.nn: MobileNets, SqueezeNet, DS-CNN.

Below 64 rows or columns those that were made for photographs halve the map less often at their start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foreseed.engine.ops import Shape
from foreseed.models.errors import ModelError

Norm = Callable[[int], nn.Module]

_SMALL = 64
_LEAST = 32


def _early_stride(in_shape: Shape) -> int:
    if min(in_shape[1:]) < _LEAST:
        raise ModelError(f"in_shape {in_shape}: too small for this net; use images of {_LEAST}x{_LEAST} or more")
    return 1 if min(in_shape[1:]) < _SMALL else 2


class _ConvNorm(nn.Sequential):
    """A conv that keeps the map but for its stride, its norm, and an activation if one is given."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int,
        norm: Norm,
        act: Callable[[], nn.Module] | None = None,
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = norm(n_out)
        if act is not None:
            self.act = act()


class _SqueezeExcite(nn.Module):
    """A factor for every channel, from the means of all of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _multiple_of_8(channels / 4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.act = nn.ReLU()
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        factors: Tensor = self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))
        return x * factors


class _Bottleneck(NamedTuple):
    """A row of a MobileNet's table."""

    kernel: int
    expanded: int
    n_out: int
    excite: bool
    act: Callable[[], nn.Module]
    stride: int


class _InvertedResidual(nn.Module):
    """Wider, over the map channel by channel, narrower; with a shortcut where the shape stays."""

    def __init__(self, n_in: int, row: _Bottleneck, norm: Norm) -> None:
        super().__init__()
        wide = row.expanded
        self.block = nn.Sequential()
        if wide != n_in:
            self.block.add_module("expand", _ConvNorm(n_in, wide, 1, norm, row.act))
        self.block.add_module("depthwise", _ConvNorm(wide, wide, row.kernel, norm, row.act, row.stride, groups=wide))
        if row.excite:
            self.block.add_module("excite", _SqueezeExcite(wide))
        self.block.add_module("project", _ConvNorm(wide, row.n_out, 1, norm))
        self.has_shortcut = row.stride == 1 and n_in == row.n_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y if self.has_shortcut else y


class MobileNetV2Tiny(nn.Sequential):
    """MobileNetV2 with few channels and no wide layer before the classifier."""

    def __init__(self, in_shape: Shape, classes: int, norm: Norm) -> None:
        super().__init__()
        n_in = 16
        self.stem = _ConvNorm(in_shape[0], n_in, 3, norm, nn.ReLU6, _early_stride(in_shape))
        self.blocks = nn.Sequential()
        for expand, n_out, times, stride in ((1, 8, 1, 1), (6, 16, 2, 2), (6, 24, 2, 2), (6, 32, 3, 2), (6, 48, 2, 1)):
            for i in range(times):
                row = _Bottleneck(3, expand * n_in, n_out, False, nn.ReLU6, 1 if i else stride)
                self.blocks.append(_InvertedResidual(n_in, row, norm))
                n_in = n_out
        self.last = _ConvNorm(n_in, 128, 1, norm, nn.ReLU6)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(128, classes)


class MobileNetV3Small(nn.Sequential):
    """MobileNetV3-small, width 1."""

    def __init__(self, in_shape: Shape, classes: int, norm: Norm) -> None:
        super().__init__()
        early, relu, swish, n_in = _early_stride(in_shape), nn.ReLU, nn.Hardswish, 16
        self.stem = _ConvNorm(in_shape[0], n_in, 3, norm, swish, early)
        self.blocks = nn.Sequential()
        for row in (
            _Bottleneck(3, 16, 16, True, relu, early),
            _Bottleneck(3, 72, 24, False, relu, 2),
            _Bottleneck(3, 88, 24, False, relu, 1),
            _Bottleneck(5, 96, 40, True, swish, 2),
            _Bottleneck(5, 240, 40, True, swish, 1),
            _Bottleneck(5, 240, 40, True, swish, 1),
            _Bottleneck(5, 120, 48, True, swish, 1),
            _Bottleneck(5, 144, 48, True, swish, 1),
            _Bottleneck(5, 288, 96, True, swish, 2),
            _Bottleneck(5, 576, 96, True, swish, 1),
            _Bottleneck(5, 576, 96, True, swish, 1),
        ):
            self.blocks.append(_InvertedResidual(n_in, row, norm))
            n_in = row.n_out
        self.last = _ConvNorm(n_in, 576, 1, norm, swish)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(576, 1024)
        self.act = swish()
        self.fc2 = nn.Linear(1024, classes)


class _Fire(nn.Module):
    """A few channels, expanded by 1x1 and by 3x3 kernels side by side."""

    def __init__(self, n_in: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(n_in, squeezed, 1)
        self.expand1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.squeeze(x))
        return torch.cat([self.act(self.expand1(x)), self.act(self.expand3(x))], 1)


class SqueezeNet(nn.Sequential):
    """SqueezeNet 1.1, without its dropout, which no program has."""

    def __init__(self, in_shape: Shape, classes: int) -> None:
        halve = (3, 2)
        super().__init__(
            nn.Conv2d(in_shape[0], 64, 3, _early_stride(in_shape)), nn.ReLU(),
            nn.MaxPool2d(*halve, ceil_mode=True), _Fire(64, 16, 64), _Fire(128, 16, 64),
            nn.MaxPool2d(*halve, ceil_mode=True), _Fire(128, 32, 128), _Fire(256, 32, 128),
            nn.MaxPool2d(*halve, ceil_mode=True), _Fire(256, 48, 192), _Fire(384, 48, 192), _Fire(384, 64, 256),
            _Fire(512, 64, 256), nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )  # fmt: skip


class DSCNN(nn.Sequential):
    """DS-CNN as keyword spotters have it: a wide first kernel, then 3x3 convs channel by channel and 1x1 convs."""

    def __init__(self, in_shape: Shape, classes: int, norm: Norm) -> None:
        super().__init__()
        if in_shape[2] < 2:
            raise ModelError(f"in_shape {in_shape}: too narrow for the kernel of DS-CNN; use 2 columns or more")
        self.conv = nn.Conv2d(in_shape[0], 64, (10, 4), 2, (5, 1), bias=False)
        self.norm = norm(64)
        self.act = nn.ReLU()
        for i in range(1, 5):
            self.add_module(f"depthwise{i}", _ConvNorm(64, 64, 3, norm, nn.ReLU, groups=64))
            self.add_module(f"pointwise{i}", _ConvNorm(64, 64, 1, norm, nn.ReLU))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64, classes)


def _multiple_of_8(channels: float) -> int:
    """The nearest, but at least 8 and not more than a tenth below."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near

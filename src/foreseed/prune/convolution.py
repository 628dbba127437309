"""Float64 convolutions, a few images at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PATCHES_BYTES = 1_250_000
"""Patches that are unrolled at a time: one image of ResNet-20's widest layers."""


class FewImagesAtATime(TorchFunctionMode):
    """While it is entered, torch convolves float64 images in pieces; values and gradients are as before.

    For float64 torch has no oneDNN: it unrolls the patches of all images into one matrix before it multiplies any.
    Of a hundred images, which BatchNorm's statistics need at once, that is 118 MB where ResNet-20 is widest.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and len(args) > 1 and args[0].dtype == torch.float64 and args[0].ndim == 4:
            images, weight, *options = args
            patches = weight.element_size() * weight[0].numel() * images.shape[2] * images.shape[3]
            step = max(1, _PATCHES_BYTES // patches)
            if step < len(images):
                return torch.cat([func(piece, weight, *options, **kwargs) for piece in images.split(step)])
        return func(*args, **kwargs)

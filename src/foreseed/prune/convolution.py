"""Float64 convolutions: of live weights alone where the C engine is fast, else torch's, a few images at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

try:
    from foreseed.engine._native import ffi, lib
    from foreseed.engine.native import isa
except ImportError:  # the engine was not built here
    isa = None  # type: ignore[assignment]

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


class LiveWeightsAlone(FewImagesAtATime):
    """While it is entered, float64 convolutions skip weights of zero, and their gradients, which are zero then.

    That is C's work (`csrc/host/conv64.h`), with AVX2 or NEON; else (`FORESEED_ISA=plain` too), and for dilated or
    grouped kernels, it is torch's, a few images at a time. Both give the same, to rounding. C takes three quarters of
    torch's time where all weights live, and the less, the fewer do.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.conv2d and (convolved := _convolved(*args, **(kwargs or {}))) is not None:
            return convolved
        return super().__torch_function__(func, types, args, kwargs)


def _convolved(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    """What `torch.conv2d` gives, or None where that is left to torch, which also says what is wrong with arguments."""
    if isa is None or isa() == "plain" or input.dtype != torch.float64 or input.ndim != 4:
        return None
    if isinstance(padding, str) or groups != 1 or _pair(dilation) != (1, 1) or input.shape[1] != weight.shape[1]:
        return None
    kernel, strides, borders = tuple(weight.shape[2:]), _pair(stride), _pair(padding)
    places = zip(input.shape[2:], kernel, strides, borders, strict=True)
    size = tuple((n + 2 * border - k) // step + 1 for n, k, step, border in places)
    if min(size) < 1:
        return None
    conv = {
        "images": len(input), "in": weight.shape[1], "out": weight.shape[0], "in_size": tuple(input.shape[2:]),
        "out_size": size, "kernel": kernel, "stride": strides, "padding": borders,
    }  # fmt: skip
    result: torch.Tensor = _Convolution.apply(input, weight, ffi.new("fs_conv64 *", conv))  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias.reshape(-1, 1, 1)


class _Convolution(torch.autograd.Function):
    """A convolution of live weights; `conv` is its shape, as C has it."""

    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, weight: torch.Tensor, conv: Any) -> torch.Tensor:
        images, weight = images.contiguous(), weight.contiguous()
        ctx.save_for_backward(images, weight)
        ctx.conv = conv
        result, scratch = images.new_empty(len(images), len(weight), *conv.out_size), _scratch(conv)
        lib.fs_conv64_forward(conv, _at(images), _at(weight), _at(result), _at(scratch))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        images, weight = ctx.saved_tensors
        of_images = torch.empty_like(images) if ctx.needs_input_grad[0] else None
        gradient, of_weight, scratch = gradient.contiguous(), torch.empty_like(weight), _scratch(ctx.conv)
        lib.fs_conv64_backward(
            ctx.conv, _at(images), _at(weight), _at(gradient), _at(of_images), _at(of_weight), _at(scratch)
        )
        return of_images, of_weight, None


def _scratch(conv: Any) -> torch.Tensor:
    """Memory to work in, which torch aligns as C wants it."""
    return torch.empty(lib.fs_conv64_scratch(conv) // 8, dtype=torch.float64)


def _at(numbers: torch.Tensor | None) -> Any:
    """Where C finds them, for as long as the caller holds the tensor."""
    return ffi.NULL if numbers is None else ffi.cast("double *", numbers.data_ptr())

"""The layers and functions that a program knows, each as the op that it becomes.

Every handler below has the signature of the torch function whose name it carries, after the net that it adds to: a
call in `forward` is understood by calling its handler with the same arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from foreseed.engine.ops import CEIL, LARGEST, Act, Kind, Op, Pool, Shape
from foreseed.engine.walker import place

_CHECK = "check input_shape and the layers before"


class Step(NamedTuple):
    """An op, the shape of what it makes, its layer's name, and the module whose parameters it uses."""

    op: Op
    shape: Shape
    name: str
    module: nn.Module | None


class Refusal(Exception):  # noqa: N818 - never leaves this room: `trace` adds the place and raises the error
    """Why a layer or a call cannot be part of a program."""


class Batch:
    """The number of images: what `x.size(0)` is while no images are there."""

    def __repr__(self) -> str:
        return "N"


BATCH = Batch()


@dataclass(frozen=True)
class View:
    """What a variable in `forward` holds: a tensor of the program, perhaps seen flattened."""

    tensor: int
    shape: Shape
    flat: bool = False

    @property
    def features(self) -> int:
        return prod(self.shape)

    @property
    def dims(self) -> tuple[Batch | int, ...]:
        return (BATCH, self.features) if self.flat else (BATCH, *self.shape)

    def __repr__(self) -> str:
        return f"tensor{self.dims}"


class Net:
    """The steps so far, and what the variables of `forward` hold."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.env: dict[Any, Any] = {}
        self.name = ""

    def emit(self, op: Op, x: View, module: nn.Module | None = None, other: View | None = None) -> View:
        """Append an op that reads x, and another tensor if it reads two, and return its result."""
        numbers = (op.channels, op.groups, *op.window)
        require(max(numbers) < 1 << 16, f"needs the numbers {numbers}, a program holds up to 65535")
        require(max(op.pool_window) < 1 << 8, f"needs the pooling window {op.pool_window}, a program holds up to 255")
        try:
            shape = place(op, (x.shape,) if other is None else (x.shape, other.shape)).layer.shape
        except ValueError as error:
            raise Refusal(f"has {error}; {_CHECK}") from None
        require(prod(shape) <= LARGEST, f"makes a tensor of {shape}, larger than 2^28 numbers")
        require(max(shape) < 1 << 16, f"makes a tensor of {shape}, a program has sides up to 65535")
        self.steps.append(Step(op, shape, self.name, module))
        return View(len(self.steps), shape, x.flat)

    def overwrite(self, old: View, new: View) -> View:
        """An in-place call: whatever held the old tensor, flattened or not, holds the new one from now on."""
        for key, value in self.env.items():
            if isinstance(value, View) and value.tensor == old.tensor:
                self.env[key] = replace(value, tensor=new.tensor)
        return new


def require(condition: Any, reason: str) -> Any:
    """The condition's value if it is true; a refusal otherwise."""
    if not condition:
        raise Refusal(reason)
    return condition


def _pair(number: Any) -> tuple[int, int]:
    first, second = (number, number) if isinstance(number, int) else number
    return first, second


# --- layers with parameters ---


def _conv2d(net: Net, module: nn.Conv2d, x: View) -> View:
    require(not x.flat, "reads a flattened tensor, expected channels x height x width")
    require(max(module.dilation) <= 256, f"has dilation {module.dilation}, a program holds up to 256")
    require(module.padding_mode == "zeros", f"has padding_mode {module.padding_mode!r}, only 'zeros' is supported")
    require(x.shape[0] == module.in_channels, f"expects {module.in_channels} channels and reads {x}; {_CHECK}")
    kernel, padding = module.kernel_size, module.padding
    if padding == "same":
        around = [d * (k - 1) for d, k in zip(module.dilation, kernel, strict=True)]
        require(not any(n % 2 for n in around), f"pads the even kernel {kernel} unevenly; pad with a number instead")
        padding = (around[0] // 2, around[1] // 2)
    elif padding == "valid":
        padding = (0, 0)
    window, dilation = (*kernel, *module.stride, *_pair(padding)), _pair(module.dilation)
    return _weighted(net, module, x, module.out_channels, module.groups, window, dilation)


def _linear(net: Net, module: nn.Linear, x: View) -> View:
    require(x.flat, f"reads {x}; flatten it first with torch.flatten(x, 1)")
    require(x.features == module.in_features, f"expects {module.in_features} features and reads {x}; {_CHECK}")
    _, h, w = x.shape
    return _weighted(net, module, x, module.out_features, 1, (h, w, 1, 1, 0, 0))


def _weighted(
    net: Net,
    module: nn.Conv2d | nn.Linear,
    x: View,
    channels: int,
    groups: int,
    window: Any,
    dilation: tuple[int, int] = (1, 1),
) -> View:
    require(module.weight.numel() <= LARGEST, f"has {module.weight.numel()} weights, a layer may have 2^28")
    flags = int(module.bias is not None)
    # A kernel of one row or column spans no more for its dilation.
    dh, dw = (d if k > 1 else 1 for d, k in zip(dilation, window, strict=False))
    op = Op(Kind.CONV, x.tensor, flags=flags, channels=channels, groups=groups, window=window, dilation=(dh, dw))
    return net.emit(op, x, module)


def _batch_norm2d(net: Net, module: nn.BatchNorm2d, x: View) -> View:
    require(not x.flat, "reads a flattened tensor, expected channels x height x width")
    return _batch_norm(net, module, x)


def _batch_norm1d(net: Net, module: nn.BatchNorm1d, x: View) -> View:
    require(x.flat, "reads a map, expected a row of features; use BatchNorm2d")
    require(x.shape[1:] == (1, 1), "reads a flattened map; normalise it by BatchNorm2d before it is flattened")
    return _batch_norm(net, module, x)


def _batch_norm(net: Net, module: nn.BatchNorm1d | nn.BatchNorm2d, x: View) -> View:
    require(module.running_mean is not None, "keeps no running statistics; set track_running_stats=True")
    return _norm(net, module, x, module.num_features, 0)


def _group_norm(net: Net, module: nn.GroupNorm, x: View) -> View:
    require(not x.flat or x.shape[1:] == (1, 1), "reads a flattened map; normalise it before it is flattened")
    return _norm(net, module, x, module.num_channels, module.num_groups)


def _norm(
    net: Net, module: nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm, x: View, channels: int, groups: int
) -> View:
    require(x.shape[0] == channels, f"expects {channels} channels and reads {x}; {_CHECK}")
    require(module.eps > 0, f"has eps {module.eps}, expected more than 0")
    affine = module.weight is not None
    require(affine == (module.bias is not None), "has only one of weight and bias; a program has both or none")
    op = Op(Kind.NORM, x.tensor, flags=int(affine), groups=groups, eps=module.eps)
    return net.emit(op, x, module)


# --- functions: what a module without parameters does, and what `forward` may call itself ---


def _activation(act: Act, always_inplace: bool = False) -> Callable[..., View]:
    def activate(net: Net, input: View, inplace: bool = always_inplace) -> View:
        return _activate(net, input, act, inplace)

    return activate


def _activate(net: Net, input: View, act: Act, inplace: bool = False, slope: float = 0.0) -> View:
    y = net.emit(Op(Kind.ACT, input.tensor, act=act, slope=slope), input)
    return net.overwrite(input, y) if inplace else y


_relu, _relu_, _hardswish = _activation(Act.RELU), _activation(Act.RELU, True), _activation(Act.HARDSWISH)
_relu6, _silu, _hardsigmoid = _activation(Act.RELU6), _activation(Act.SILU), _activation(Act.HARDSIGMOID)


def _leaky_relu(net: Net, input: View, negative_slope: float = 0.01, inplace: bool = False) -> View:
    require(abs(negative_slope) < 1e30, f"has the slope {negative_slope}, expected a finite number")
    return _activate(net, input, Act.LEAKY_RELU, inplace, float(negative_slope))


def _gelu(net: Net, input: View, approximate: str = "none") -> View:
    return _activate(net, input, {"none": Act.GELU, "tanh": Act.GELU_TANH}[approximate])


def _tanh(net: Net, input: View) -> View:
    return _activate(net, input, Act.TANH)


def _sigmoid(net: Net, input: View) -> View:
    return _activate(net, input, Act.SIGMOID)


def _max_pool2d(
    net: Net,
    input: View,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> View:
    require(_pair(dilation) == (1, 1), f"has dilation {dilation}, only 1 is supported")
    require(not return_indices, "has return_indices=True, only False is supported")
    return _pool(net, input, Pool.MAX, kernel_size, stride, padding, ceil_mode)


def _avg_pool2d(
    net: Net,
    input: View,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> View:
    require(divisor_override is None, "has a divisor_override, only None is supported")
    pool = Pool.AVERAGE if count_include_pad else Pool.AVERAGE_INSIDE
    return _pool(net, input, pool, kernel_size, stride, padding, ceil_mode)


def _adaptive_avg_pool2d(net: Net, input: View, output_size: Any) -> View:
    require(not input.flat, "reads a flattened tensor, expected channels x height x width")
    asked = output_size if isinstance(output_size, Sequence) else (output_size, output_size)
    (_, h, w), (rows, columns) = input.shape, (n or side for n, side in zip(asked, input.shape[1:], strict=True))
    if h % rows == 0 and w % columns == 0:
        return _pool(net, input, Pool.AVERAGE, (h // rows, w // columns), None, 0)
    return net.emit(Op(Kind.POOL, input.tensor, pool=Pool.ADAPTIVE, pool_window=(rows, columns, 0, 0, 0, 0)), input)


def _mean(net: Net, input: View, dim: Any, keepdim: bool = False) -> View:
    dims = sorted(d % 4 for d in dim)
    require(dims == [2, 3] and not input.flat, f"averages over {dim}, only over the whole map, (2, 3), is supported")
    return replace(_pool(net, input, Pool.AVERAGE, input.shape[1:], None, 0), flat=not keepdim)


def _pool(net: Net, x: View, pool: Pool, kernel: Any, stride: Any, padding: Any, ceil_mode: bool = False) -> View:
    require(not x.flat, "reads a flattened tensor, expected channels x height x width")
    (kh, kw), (sh, sw), (ph, pw) = _pair(kernel), _pair(stride or kernel), _pair(padding)
    require(2 * ph <= kh and 2 * pw <= kw, f"has padding {ph}x{pw}, more than half of its kernel {kh}x{kw}")
    # Where windows come out even, both modes are one.
    even = (x.shape[1] + 2 * ph - kh) % sh == (x.shape[2] + 2 * pw - kw) % sw == 0
    flags = CEIL if ceil_mode and not even else 0
    return net.emit(Op(Kind.POOL, x.tensor, flags=flags, pool=pool, pool_window=(kh, kw, sh, sw, ph, pw)), x)


def _zero_pad(net: Net, module: nn.ZeroPad2d, x: View) -> View:
    return _pad(net, x, module.padding)


def _pad(net: Net, input: View, pad: Any, mode: str = "constant", value: float | None = None) -> View:
    require(not input.flat, "reads a flattened tensor, expected channels x height x width")
    require(mode == "constant" and not value, "pads with something else than zeros, only zeros are supported")
    left, right, top, bottom = (*pad, 0, 0)[:4]
    require(
        len(pad) in (2, 4) and min(pad) >= 0, f"pads by {tuple(pad)}, expected (left, right, top, bottom) from 0 on"
    )
    return net.emit(Op(Kind.PAD, input.tensor, window=(top, left, bottom, right, 0, 0)), input)


def _add(net: Net, input: View, other: Any, *, alpha: float = 1) -> View:
    require(isinstance(other, View), "adds something that is not a tensor of the forward pass")
    require(alpha == 1, f"has alpha={alpha}, only 1 is supported")
    same = (input.shape, input.flat) == (other.shape, other.flat)
    require(same, f"adds {input} and {other}, expected two tensors of one shape that were flattened alike")
    return net.emit(Op(Kind.ADD, input.tensor, other.tensor), input, other=other)


def _add_(net: Net, input: View, other: Any, *, alpha: float = 1) -> View:
    return net.overwrite(input, _add(net, input, other, alpha=alpha))


def _mul(net: Net, input: Any, other: Any) -> View:
    views = isinstance(input, View) and isinstance(other, View)
    require(views, "multiplies by something that is not a tensor of the forward pass")
    of_channels = (other.shape[0], 1, 1)
    if input.shape == of_channels != other.shape:
        input, other = other, input  # the whole map first
    alike = input.flat == other.flat and input.shape[0] == other.shape[0]
    fits = alike and (other.shape == input.shape or (other.shape == of_channels and not other.flat))
    require(fits, f"multiplies {input} by {other}, expected one shape, or one number for each channel (N, C, 1, 1)")
    return net.emit(Op(Kind.MUL, input.tensor, other.tensor), input, other=other)


def _mul_(net: Net, input: View, other: Any) -> View:
    y = _mul(net, input, other)
    require(y.shape == input.shape, f"makes {y} of {input} in place; multiply the larger tensor")
    return net.overwrite(input, y)


def _cat(net: Net, tensors: Any, dim: int = 0) -> View:
    views = len(tensors) > 0 and all(isinstance(x, View) for x in tensors)
    require(views, "joins something that is not a tensor of the forward pass")
    joined: View = tensors[0]
    for x in tensors[1:]:
        over_channels = x.flat == joined.flat and dim % len(x.dims) == 1
        require(over_channels, f"joins {joined} and {x} over dimension {dim}, only over channels, dim=1, is supported")
        require(x.shape[1:] == joined.shape[1:], f"joins {joined} and {x}, expected maps of one size")
        joined = net.emit(Op(Kind.CAT, joined.tensor, x.tensor), joined, other=x)
    return joined


def _flatten(net: Net, input: View, start_dim: int = 0, end_dim: int = -1) -> View:
    rank = len(input.dims)
    whole = (start_dim % rank, end_dim % rank) == (1, rank - 1)
    require(whole, f"flattens dimensions {start_dim} to {end_dim}, only all but the batch, 1 to -1, is supported")
    return replace(input, flat=True)


def _view(net: Net, input: View, *shape: Any) -> View:
    dims = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    batch, rest = dims[0], dims[1:]
    keeps_batch = batch is BATCH or (batch == -1 and -1 not in rest)
    flat = len(rest) == 1 and rest[0] in (-1, input.features)
    same = keeps_batch and (flat or rest == input.shape)
    require(same, f"makes {dims} of {input}, only flattening all but the batch, (N, -1), is supported")
    return replace(input, flat=flat)


def _size(net: Net, input: View, dim: int | None = None) -> Any:
    return input.dims if dim is None else input.dims[dim]


def _getattr(net: Net, input: View, name: str) -> Any:
    require(name == "shape", f"reads the attribute {name!r} of a tensor, only 'shape' is supported")
    return input.dims


def _identity(net: Net, input: View, *args: Any, **kwargs: Any) -> View:
    return input


def _module(handler: Callable[..., View]) -> Callable[..., View]:
    """A module without parameters, whose attributes are the arguments of its function."""
    names = list(signature(handler).parameters)[2:]
    return lambda net, module, x: handler(net, x, **{name: getattr(module, name) for name in names})


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.relu: _relu,
    torch.relu: _relu,
    torch.relu_: _relu_,
    F.hardswish: _hardswish,
    F.relu6: _relu6,
    F.leaky_relu: _leaky_relu,
    F.hardsigmoid: _hardsigmoid,
    F.silu: _silu,
    F.gelu: _gelu,
    torch.tanh: _tanh,
    torch.sigmoid: _sigmoid,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    torch.mean: _mean,
    operator.add: _add,
    operator.iadd: _add_,
    torch.add: _add,
    operator.mul: _mul,
    operator.imul: _mul_,
    torch.mul: _mul,
    torch.cat: _cat,
    torch.concat: _cat,
    F.pad: _pad,
    torch.flatten: _flatten,
    torch.reshape: _view,
    getattr: _getattr,
    F.dropout: _identity,
    F.dropout2d: _identity,
}

METHODS: dict[Any, Callable[..., Any]] = {
    "relu": _relu,
    "relu_": _relu_,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "mul": _mul,
    "mul_": _mul_,
    "add": _add,
    "add_": _add_,
    "flatten": _flatten,
    "view": _view,
    "reshape": _view,
    "mean": _mean,
    "size": _size,
    "contiguous": _identity,
}

MODULES: dict[type[nn.Module], Callable[..., View]] = {
    nn.Conv2d: _conv2d,
    nn.Linear: _linear,
    nn.ReLU: _module(_relu),
    nn.Hardswish: _module(_hardswish),
    nn.ReLU6: _module(_relu6),
    nn.LeakyReLU: _module(_leaky_relu),
    nn.Hardsigmoid: _module(_hardsigmoid),
    nn.Sigmoid: _module(_sigmoid),
    nn.SiLU: _module(_silu),
    nn.Tanh: _module(_tanh),
    nn.GELU: _module(_gelu),
    nn.MaxPool2d: _module(_max_pool2d),
    nn.AvgPool2d: _module(_avg_pool2d),
    nn.AdaptiveAvgPool2d: _module(_adaptive_avg_pool2d),
    nn.ZeroPad2d: _zero_pad,
    nn.BatchNorm1d: _batch_norm1d,
    nn.BatchNorm2d: _batch_norm2d,
    nn.GroupNorm: _group_norm,
    nn.Flatten: _module(_flatten),
    nn.Identity: lambda net, m, x: x,
    nn.Dropout: lambda net, m, x: x,
    nn.Dropout2d: lambda net, m, x: x,
}

"""The models that have a name: the paper's as plain torch.nn, those of `mobile`, and `build`, which makes one."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

from foreseed.draws import Draws
from foreseed.engine.ops import Shape
from foreseed.models.errors import ModelError, UnknownModelError
from foreseed.models.mobile import DSCNN, MobileNetV2Tiny, MobileNetV3Small, SqueezeNet

_T = TypeVar("_T")
Array = npt.NDArray[Any]


def lenet5(
    in_shape: Shape = (3, 32, 32),
    classes: int = 10,
    *,
    activation: str = "hardswish",
    init: str = "kaiming",
    seed: int = 0,
) -> nn.Module:
    """Make the classic LeNet-5: two 5x5 convs, each with a 2x2 max pool, then 120, 84 and `classes` units.

    62,006 parameters and 651,720 MACs at 3x32x32 and 10 classes.
    """
    return _lenet(in_shape, (120, 84, classes), (2, 2), activation, init, seed)


def lenet5_wide(
    in_shape: Shape = (3, 32, 32),
    classes: int = 10,
    *,
    activation: str = "hardswish",
    init: str = "kaiming",
    seed: int = 0,
) -> nn.Module:
    """Make LeNet-5 as FedDST has it: 3x3 max pools with stride 1, so the first linear layer is 16 times wider.

    Like FedDST's own it has the hidden layers 120 and 84 (782,006 parameters, 2,293,320 MACs at 3x32x32 and 10
    classes), but only the first of them from 100 classes on (783,092 parameters). It ends in logits: the softmax that
    FedDST puts before its cross entropy is left out.
    """
    hidden = (120,) if classes >= 100 else (120, 84)
    return _lenet(in_shape, (*hidden, classes), (3, 1), activation, init, seed)


def lenet_baffle(
    in_shape: Shape = (3, 32, 32),
    classes: int = 10,
    *,
    norm: str = "group",
    activation: str = "hardswish",
    init: str = "kaiming",
    seed: int = 0,
) -> nn.Module:
    """Make LeNet as BAFFLE's authors have it: two padded 5x5 convs, a max pool between them, a global average pool.

    27,530 parameters and 7.78 M MACs at 3x32x32 and 10 classes; twice the channels from 100 classes on, 117,860
    parameters. Norms have no scale and shift to train; `norm="none"` leaves them out.
    """
    act, normalise = _choose("activation", activation, _ACTIVATIONS), _choose("norm", norm, _BARE_NORMS)
    net, widths = nn.Sequential(), (32, 128) if classes >= 100 else (16, 64)
    for i, (n_in, n_out) in enumerate(pairwise((in_shape[0], *widths)), 1):
        net.add_module(f"conv{i}", nn.Conv2d(n_in, n_out, 5, padding=2))
        net.add_module(f"norm{i}", normalise(n_out))
        net.add_module(f"act{i}", act())
        net.add_module(f"pool{i}", nn.MaxPool2d(2) if i == 1 else nn.AdaptiveAvgPool2d(1))
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc", nn.Linear(widths[-1], classes))
    return _initialised(net, init, seed)


def resnet20(
    in_shape: Shape = (3, 32, 32),
    classes: int = 10,
    *,
    norm: str = "group",
    activation: str = "hardswish",
    init: str = "kaiming",
    seed: int = 0,
) -> nn.Module:
    """Make ResNet-20 for small images, with 1x1 convs as shortcuts where the shape changes (option B).

    272,474 parameters and 40.81 M MACs at 3x32x32 and 10 classes; 278,324 parameters for 100. `norm="group"` is
    GroupNorm with max(2, C / 16) groups and, like BatchNorm, a trainable scale and shift.
    """
    act = _choose("activation", activation, _ACTIVATIONS)
    return _initialised(_ResNet20(in_shape[0], classes, _choose("norm", norm, _NORMS), act), init, seed)


def mobilenetv2_tiny(
    in_shape: Shape = (3, 32, 32), classes: int = 10, *, norm: str = "group", init: str = "kaiming", seed: int = 0
) -> nn.Module:
    """Make a MobileNetV2 of at most 48 channels between its blocks: 117,738 parameters at 3x32x32 and 10 classes."""
    return _initialised(MobileNetV2Tiny(in_shape, classes, _choose("norm", norm, _NORMS)), init, seed)


def mobilenetv3_small(
    in_shape: Shape = (3, 32, 32), classes: int = 10, *, norm: str = "group", init: str = "kaiming", seed: int = 0
) -> nn.Module:
    """Make MobileNetV3-small with squeeze-and-excite, as published: 1,528,106 parameters for 10 classes."""
    return _initialised(MobileNetV3Small(in_shape, classes, _choose("norm", norm, _NORMS)), init, seed)


def squeezenet(in_shape: Shape = (3, 32, 32), classes: int = 10, *, init: str = "kaiming", seed: int = 0) -> nn.Module:
    """Make SqueezeNet 1.1, as published: 727,626 parameters for 10 classes."""
    return _initialised(SqueezeNet(in_shape, classes), init, seed)


def dscnn(
    in_shape: Shape = (1, 49, 10), classes: int = 12, *, norm: str = "group", init: str = "kaiming", seed: int = 0
) -> nn.Module:
    """Make the small DS-CNN of keyword spotting: 23,180 parameters for 49 frames of 10 coefficients and 12 words."""
    return _initialised(DSCNN(in_shape, classes, _choose("norm", norm, _NORMS)), init, seed)


def build(
    name: str,
    in_shape: Shape,
    classes: int,
    *,
    activation: str = "hardswish",
    norm: str = "group",
    init: str = "kaiming",
    seed: int = 0,
) -> nn.Module:
    """Make a model by name: the same weights for the same seed on every machine; torch's global generator is kept.

    Names: those of `MODELS`, or `package.module:factory` for a model of your own, installed or in the current folder: a
    function or class that is given `in_shape` and `classes` if it has parameters of these names, and needs nothing else
    (its weights are as portable as what it draws them with; torch's generator is seeded for it). `activation`, `norm`
    and `init` are for the named models that have a choice, with the defaults of an experiment; your own sees to them
    itself.
    """
    options = {"in_shape": tuple(in_shape), "classes": classes}
    with _current_folder_too():
        if ":" in name:
            factory = _own_factory(name)
        else:
            factory = _choose("model", name, MODELS, UnknownModelError, "; for your own write package.module:factory")
            options |= {"activation": activation, "norm": norm, "init": init, "seed": seed}
        model = _made(name, factory, options, seed)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {name!r}: made a {type(model).__name__}, expected a torch.nn.Module; return the model")
    return model


def _made(name: str, factory: Callable[..., Any], options: Mapping[str, Any], seed: int) -> Any:
    """What a factory returns, given those of the options that it asks for."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            wanted = inspect.signature(factory).parameters
            return factory(**{key: value for key, value in options.items() if key in wanted})
    except ModelError:
        raise
    except Exception as error:  # a user's own factory may fail in any way
        raise ModelError(
            f"model {name!r}: its factory failed ({error}); it may take in_shape and classes, and nothing else"
        ) from error


MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet5": lenet5,
    "lenet5-wide": lenet5_wide,
    "resnet20": resnet20,
    "mobilenetv2-tiny": mobilenetv2_tiny,
    "mobilenetv3-small": mobilenetv3_small,
    "squeezenet": squeezenet,
    "dscnn": dscnn,
    "lenet-baffle": lenet_baffle,
}
"""The names that `build` knows."""


def _group_norm(channels: int) -> nn.Module:
    most = max(2, channels // 16)
    return nn.GroupNorm(next(groups for groups in range(most, 0, -1) if channels % groups == 0), channels)


def _kaiming(weight: Tensor, draws: Draws) -> tuple[Array, float]:
    """Normal numbers of variance 2 / fan-in for the weights, biases of 0."""
    return math.sqrt(2 / weight[0].numel()) * draws.normals(*weight.shape), 0.0


def _torch_default(weight: Tensor, draws: Draws) -> tuple[Array, float]:
    """PyTorch's own: weights and biases even between -1 and 1 over the root of the fan-in."""
    bound = 1 / math.sqrt(weight[0].numel())
    return bound * (2 * draws.uniforms(weight.numel()).reshape(weight.shape) - 1), bound


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "hardswish": nn.Hardswish}
_NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": _group_norm}
_BARE_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": lambda channels: nn.BatchNorm2d(channels, affine=False),
    "group": lambda channels: nn.GroupNorm(max(2, channels // 16), channels, affine=False),
    "none": lambda channels: nn.Identity(),
}
_INITS: dict[str, Callable[[Tensor, Draws], tuple[Array, float]]] = {"kaiming": _kaiming, "torch": _torch_default}
"""For a layer's weight: its initial numbers, and how far from 0 its biases may lie."""


@torch.no_grad()
def _initialised(net: nn.Module, init: str, seed: int) -> nn.Module:
    """Fresh weights, the same on every machine; torch's own draws are not."""
    draw, draws = _choose("init", init, _INITS), Draws(seed, "init")
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weights, bound = draw(module.weight, draws)
            module.weight.copy_(torch.from_numpy(weights))
            if module.bias is not None:
                spread = 2 * draws.uniforms(module.bias.numel()) - 1
                module.bias.copy_(torch.from_numpy(bound * spread + 0.0))  # 0 keeps no sign
    return net


def _lenet(
    in_shape: Shape, widths: Sequence[int], pool: tuple[int, int], activation: str, init: str, seed: int
) -> nn.Module:
    act = _choose("activation", activation, _ACTIVATIONS)
    net, (channels, *sides) = nn.Sequential(), in_shape
    for i, (n_in, n_out) in enumerate(pairwise((channels, 6, 16)), 1):
        net.add_module(f"conv{i}", nn.Conv2d(n_in, n_out, 5))
        net.add_module(f"act{i}", act())
        net.add_module(f"pool{i}", nn.MaxPool2d(*pool))
        sides = [(side - 4 - pool[0]) // pool[1] + 1 for side in sides]
    if min(sides) < 1:
        raise ModelError(
            f"in_shape {in_shape}: too small for the convs and pools of LeNet-5; use images of 16x16 or more"
        )
    net.add_module("flatten", nn.Flatten())
    for i, (n_in, n_out) in enumerate(pairwise((16 * sides[0] * sides[1], *widths)), 1):
        if i > 1:
            net.add_module(f"act{i + 1}", act())
        net.add_module(f"fc{i}", nn.Linear(n_in, n_out))
    return _initialised(net, init, seed)


class _Block(nn.Module):
    """Two 3x3 convs and the shortcut around them."""

    def __init__(self, n_in: int, n_out: int, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> None:
        super().__init__()
        stride = n_out // n_in  # a stage that doubles the channels halves the map
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.norm1 = norm(n_out)
        self.act1 = act()
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm2 = norm(n_out)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.add_module("conv", nn.Conv2d(n_in, n_out, 1, stride, bias=False))
            self.shortcut.add_module("norm", norm(n_out))
        self.act2 = act()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        result: Tensor = self.act2(y + self.shortcut(x))
        return result


class _ResNet20(nn.Sequential):
    def __init__(
        self, channels: int, classes: int, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.norm = norm(16)
        self.act = act()
        for i, (n_in, n_out) in enumerate(pairwise((16, 16, 32, 64)), 1):
            blocks = (_Block(n_in if j == 0 else n_out, n_out, norm, act) for j in range(3))
            self.add_module(f"stage{i}", nn.Sequential(*blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64, classes)


def _choose(what: str, name: str, table: Mapping[str, _T], error: type[ModelError] = ModelError, hint: str = "") -> _T:
    if name not in table:
        near = get_close_matches(str(name), table, n=1, cutoff=0)[0]
        raise error(f"{what} {name!r}: expected one of {', '.join(table)}; did you mean {near!r}?{hint}")
    return table[name]


@contextmanager
def _current_folder_too() -> Iterator[None]:
    """Let imports look in the current folder as well, after all other places; Python itself does so only for `-m`."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        # From the end: the same folder may stand further up for other reasons.
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]


def _own_factory(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's module may fail in any way while it is imported
        raise UnknownModelError(
            f"model {name!r}: cannot import {module_name!r} ({error}); start foreseed in the folder that holds it, "
            "install it, or add its folder to PYTHONPATH"
        ) from error
    factory: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(factory):
        near = get_close_matches(attribute, dir(module), n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownModelError(f"model {name!r}: {module_name} has no function or class {attribute!r}{meant}")
    return factory

"""What `foreseed.models.compile` refuses, and the words that help its user on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from foreseed import models
from foreseed.engine.errors import ForeseedError
from foreseed.models import ModelError, UnsupportedLayerError
from tests.models.agreement import assert_same_logits
from tests.models.nets import SMALL, Net, conv, head


class Elu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x)


class Own(nn.Conv2d):
    pass


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def pooled(**options: Any) -> nn.Module:
    return nn.Sequential(conv(), nn.MaxPool2d(2, **options), head())


def averaged(**options: Any) -> nn.Module:
    return nn.Sequential(conv(), nn.AvgPool2d(2, **options), head())


def does(forward: Any, **layers: nn.Module) -> nn.Module:
    return Net(lambda m, x: m.head(forward(m, m.c(x))), c=conv(), head=head(), **layers)


SHARED = conv(4)
TIED = nn.Conv2d(4, 4, 3, padding=1)
TIED.weight = SHARED.weight
STATISTICS = nn.BatchNorm2d(4)
SUPPORTED = "supported are Conv2d, Linear, ReLU, Hardswish, ReLU6"
REFUSED: dict[str, tuple[nn.Module, list[str]]] = {
    "layer": (
        nn.Sequential(nn.Sequential(conv(), nn.ELU()), head()),
        ["0.1 (torch.nn.modules.activation.ELU) is not supported", SUPPORTED],
    ),
    "function": (
        nn.Sequential(conv(), Elu(), head()),
        ["elu in forward of 1 (tests.models.test_refusals.Elu), line", "of test_refusals.py, is not", SUPPORTED],
    ),
    "method": (
        does(lambda m, x: x.exp()),
        ["exp in forward of tests.models.nets.Net, line", SUPPORTED],
    ),
    "subclass of a layer": (nn.Sequential(Own(2, 4, 3), head()), ["0 (tests.models.test_refusals.Own) is not"]),
    "softmax": (nn.Sequential(conv(), head(), nn.LogSoftmax(1)), ["2 (", "cross entropy on logits", "leave it out"]),
    "softmax function": (does(lambda m, x: F.softmax(x, 1)), ["softmax in forward", "leave it out"]),
    "softmax method": (does(lambda m, x: x.log_softmax(1)), ["log_softmax in forward", "leave it out"]),
    "statistics of two calls": (
        does(lambda m, x: m.s(m.s(x)), s=STATISTICS),
        ["s (", "is called twice", "give each call a layer of its own"],
    ),
    "tied weights": (does(lambda m, x: m.b(m.a(x)), a=SHARED, b=TIED), ["b (", "parameters of another layer"]),
    "a layer over maps of two sizes": (
        Net(lambda m, x: m.f(x.flatten(1)) + m.f(m.c(x).flatten(1)), c=nn.Conv2d(2, 8, 5), f=nn.Linear(128, 3)),
        ["f reads flattened maps of two sizes, (4, 4) and (8, 8)", "give each call a layer of its own"],
    ),
    "control flow": (
        does(lambda m, x: x if x.sum() > 0 else -x),
        ["forward of tests.models.nets.Net cannot be traced at line", "test_refusals.py", "no control flow"],
    ),
    "loop over a size": (does(lambda m, x: x.view(*x.size())), ["cannot be traced", "torch.flatten(x, 1)"]),
    "two inputs": (TwoInputs(), ["y in forward of", "must take the batch of images alone"]),
    "a tuple": (Net(lambda m, x: (x, x)), ["forward of", "return the logits alone"]),
    "a map": (nn.Sequential(conv()), ["returns tensor(N, 4, 8, 8)", "expected a row of logits"]),
    "a flat map": (nn.Sequential(conv(), nn.Flatten()), ["returns tensor(N, 256)", "end it with a Linear layer"]),
    "too many classes": (nn.Sequential(nn.Flatten(), nn.Linear(128, 257)), ["257 logits", "at most 256 classes"]),
    "nothing to train": (
        nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ["nothing to train"],
    ),
    "too many ops": (nn.Sequential(*[nn.ReLU() for _ in range(260)], conv(), head()), ["262 ops", "at most 256"]),
    "dilation": (nn.Sequential(nn.Conv2d(2, 4, 3, dilation=300), head()), ["0 (", "dilation (300, 300)", "up to 256"]),
    "dilated kernel": (nn.Sequential(nn.Conv2d(2, 4, 3, dilation=4), head()), ["0 (", "kernel 9x9", "does not fit"]),
    "padding mode": (nn.Sequential(nn.Conv2d(2, 4, 3, padding_mode="reflect"), head()), ["0 (", "'reflect', only"]),
    "uneven padding": (nn.Sequential(nn.Conv2d(2, 4, 2, padding="same"), head()), ["0 (", "even kernel (2, 2)"]),
    "channels": (
        nn.Sequential(conv(3), head()),
        ["0 (", "expects 3 channels and reads tensor(N, 2, 8, 8)", "check input_shape"],
    ),
    "features": (
        nn.Sequential(nn.Flatten(), nn.Linear(99, 3)),
        ["1 (", "expects 99 features and reads tensor(N, 128)"],
    ),
    "linear over a map": (nn.Sequential(nn.Linear(8, 3)), ["0 (", "flatten it first"]),
    "conv over a row": (nn.Sequential(nn.Flatten(), conv()), ["1 (", "reads a flattened tensor"]),
    "kernel": (nn.Sequential(nn.Conv2d(2, 4, 9), head()), ["0 (", "kernel 9x9", "does not fit its map of 8x8"]),
    "pool dilation": (pooled(dilation=2), ["1 (", "dilation 2, only 1"]),
    "pool indices": (pooled(return_indices=True), ["1 (", "return_indices=True, only False"]),
    "pool padding": (pooled(padding=2), ["1 (", "padding 2x2, more than half of its kernel 2x2"]),
    "divisor": (averaged(divisor_override=3), ["1 (", "divisor_override, only None"]),
    "adaptive size": (nn.Sequential(conv(), nn.AdaptiveAvgPool2d(300), head()), ["1 (", "pooling window", "up to 255"]),
    "cropped": (does(lambda m, x: F.pad(x, (-1, 0))), ["pad in forward", "pads by (-1, 0)", "from 0 on"]),
    "padded with ones": (does(lambda m, x: F.pad(x, (1, 1), value=1.0)), ["pad in forward", "only zeros"]),
    "a row normalised as a map": (
        nn.Sequential(conv(), nn.Flatten(), nn.BatchNorm1d(256), nn.Linear(256, 3)),
        ["2 (", "normalise it by BatchNorm2d before"],
    ),
    "joined over rows": (does(lambda m, x: torch.cat([x, x], 2)), ["cat in forward", "only over channels, dim=1"]),
    "maps of two sizes joined": (
        does(lambda m, x: torch.cat([x, F.max_pool2d(x, 2)], 1)),
        ["cat in forward", "joins tensor(N, 4, 8, 8) and tensor(N, 4, 4, 4)", "maps of one size"],
    ),
    "maps of two sizes multiplied": (
        does(lambda m, x: x * F.max_pool2d(x, 2)),
        ["mul in forward", "multiplies tensor(N, 4, 8, 8) by tensor(N, 4, 4, 4)", "(N, C, 1, 1)"],
    ),
    "no statistics": (
        nn.Sequential(conv(), nn.BatchNorm2d(4, track_running_stats=False), head()),
        ["1 (", "track_running_stats=True"],
    ),
    "double precision": (nn.Sequential(conv(), head()).double(), ["0 (", "torch.float64", "model.float()"]),
    "alpha": (does(lambda m, x: torch.add(x, x, alpha=2)), ["add in forward", "alpha=2, only 1"]),
    "a number added": (does(lambda m, x: x + 1), ["add in forward", "not a tensor of the forward pass"]),
    "a parameter": (does(lambda m, x: x + m.head[2].weight), ["add in forward", "not a tensor of the forward pass"]),
    "broadcast": (
        does(lambda m, x: x + x.mean((2, 3), keepdim=True)),
        ["adds tensor(N, 4, 8, 8) and tensor(N, 4, 1, 1)"],
    ),
    "mean over channels": (does(lambda m, x: x.mean(1)), ["mean in forward", "no meaning"]),
    "mean over rows": (does(lambda m, x: x.mean((1, 2))), ["mean in forward", "only over the whole map, (2, 3)"]),
    "a view that mixes images": (
        does(lambda m, x: x.view(-1, 4)),
        ["view in forward", "(-1, 4) of tensor(N, 4, 8, 8)"],
    ),
    "partial flatten": (does(lambda m, x: x.flatten(2)), ["flatten in forward", "dimensions 2 to -1"]),
    "transposed": (does(lambda m, x: x.T), ["getattr in forward", "'T'", "only 'shape'"]),
    "multiplied": (does(lambda m, x: x * 2), ["mul in forward", "not a tensor of the forward pass"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_cannot_do_is_refused_with_its_place_and_the_way_out(name: str) -> None:
    model, words = REFUSED[name]
    with pytest.raises(UnsupportedLayerError) as caught:
        models.compile(model, input_shape=SMALL)
    assert isinstance(caught.value, ForeseedError)
    assert all(word in str(caught.value) for word in words), caught.value


def test_hooks_are_refused() -> None:
    model = nn.Sequential(conv(), head())
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(UnsupportedLayerError, match=r"^0 \(torch.nn.modules.conv.Conv2d\) has forward hooks"):
        models.compile(model, input_shape=SMALL)
    prune.remove(model[0], "weight")
    assert_same_logits(model, None, SMALL)


@pytest.mark.parametrize("shape", [(3, 32), (0, 8, 8), (65, 8, 8), (1, 8.0, 8), [2, 8, 8], (64, 65535, 65535)])
def test_an_input_shape_that_no_program_has_is_refused(shape: Any) -> None:
    with pytest.raises(ModelError, match=r"expected a tuple \(channels, height, width\)"):
        models.compile(nn.Sequential(conv(), head()), input_shape=shape)


@pytest.mark.parametrize(
    "options", [{"mean": [0.5]}, {"std": [0.5, 0.0]}, {"std": [1, 1, 1]}, {"mean": [float("nan"), 0]}]
)
def test_a_normalisation_that_does_not_fit_is_refused(options: Any) -> None:
    with pytest.raises(ModelError, match="a number for each of the 2 channels, std above 0"):
        models.compile(nn.Sequential(conv(), head()), input_shape=SMALL, **options)


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"function given, expected a torch\.nn\.Module"):
        models.compile(models.lenet5)  # type: ignore[arg-type]

"""`foreseed.meter.memory`: what backpropagation holds, against what torch itself says that it saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreseed import models
from foreseed.meter import BpMemory, planned_bp_bytes
from tests.models.agreement import random_mask
from tests.models.nets import SMALL, Net, conv, head


def saved_by_torch(model: nn.Module, input_shape: tuple[int, int, int], batch: int) -> int:
    """The bytes of all tensors that autograd saves in a training step's forward pass, the model's own aside."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Kept alive, or a later tensor might get the same address.
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model.train()(torch.rand(batch, *input_shape)), torch.zeros(batch, dtype=torch.int64))
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in own)


ZOO: list[tuple[str, dict[str, Any]]] = [
    ("lenet5", {"activation": "relu"}),
    ("lenet5", {"activation": "hardswish"}),
    ("lenet5-wide", {"activation": "relu"}),
    ("resnet20", {"norm": "batch", "activation": "relu"}),
    ("resnet20", {"norm": "group", "activation": "hardswish"}),
    ("mobilenetv2-tiny", {"norm": "group"}),
    ("mobilenetv3-small", {"norm": "batch"}),
    ("squeezenet", {}),
    ("dscnn", {"norm": "batch"}),
]


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize(("name", "options"), ZOO)
def test_activations_are_what_autograd_saves_to_the_byte(name: str, options: dict[str, Any], batch: int) -> None:
    model = models.build(name, (3, 32, 32), 10, **options)
    program, _ = models.compile(model)
    assert planned_bp_bytes(program, batch, True).activations == saved_by_torch(model, (3, 32, 32), batch)


NETS: dict[str, nn.Module] = {
    "average pools": nn.Sequential(
        conv(), nn.AvgPool2d(2), nn.ReLU(), nn.AvgPool2d(2, count_include_pad=False), head()
    ),
    "pool before activation": nn.Sequential(conv(), nn.MaxPool2d(2), nn.ReLU(), conv(4, 4), head()),
    "image pooled first": nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.AvgPool2d(2), conv(), head()),
    "norm without parameters first": nn.Sequential(nn.GroupNorm(2, 2, affine=False), conv(), head()),
    "norm with parameters first": nn.Sequential(nn.BatchNorm2d(2), nn.Hardswish(), conv(), head()),
    "one tensor read twice": Net(
        lambda s, x: s.head(s.a(x) + F.relu(s.b(s.a2(x)))), a=conv(), a2=conv(), b=conv(4, 4), head=head()
    ),
    "sum of the image with itself": Net(lambda s, x: s.head(s.a(F.hardswish(x + x))), a=conv(), head=head()),
    "every activation": nn.Sequential(
        conv(),
        nn.ReLU6(),
        conv(4),
        nn.LeakyReLU(0.1),
        conv(4),
        nn.Hardsigmoid(),
        conv(4),
        nn.Sigmoid(),
        conv(4),
        nn.SiLU(),
        conv(4),
        nn.Tanh(),
        conv(4),
        nn.GELU(),
        conv(4),
        nn.GELU("tanh"),
        head(),
    ),
    "products": Net(
        lambda s, x: s.head(s.a(x) * s.b(x) * s.b(x).mean((2, 3), keepdim=True)), a=conv(), b=conv(), head=head()
    ),
    "the image times its gate": Net(lambda s, x: s.head(s.c(x * s.a(x))), a=conv(2, 2), c=conv(), head=head()),
    "a square": Net(lambda s, x: (lambda y: s.head(y * y))(s.a(x)), a=conv(), head=head()),
    "joined and padded": Net(
        lambda s, x: s.head(s.b(F.pad(torch.cat([x, s.a(x), x], 1), (1, 0, 2, 0)))), a=conv(), b=conv(8), head=head()
    ),
    "a layer twice": Net(lambda s, x: s.head(s.b(F.relu(s.b(s.a(x))))), a=conv(), b=conv(4), head=head()),
    "uneven pools": nn.Sequential(conv(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.AdaptiveAvgPool2d(3), head()),
    "hardswish of a sum": Net(lambda s, x: s.head(F.hardswish(s.a(x) + s.b(x))), a=conv(), b=conv(), head=head()),
}


@pytest.mark.parametrize("name", NETS)
def test_activations_of_unusual_nets_are_what_autograd_saves(name: str) -> None:
    program, _ = models.compile(NETS[name], input_shape=SMALL)
    assert planned_bp_bytes(program, 3, False).activations == saved_by_torch(NETS[name], SMALL, 3)


def test_parts_of_a_training_step() -> None:
    model = models.build("lenet5", (3, 32, 32), 10, activation="relu")
    program, _ = models.compile(model)
    memory = planned_bp_bytes(program, 32, momentum=True)
    assert memory == BpMemory(parameters=4 * 62_006, gradients=4 * 62_006, optimiser=4 * 62_006, activations=1_832_964)
    assert memory.total == 12 * 62_006 + 1_832_964
    assert planned_bp_bytes(program, 32, momentum=False).optimiser == 0


def test_statistics_of_batch_norms_are_held_but_have_no_gradient() -> None:
    model = models.build("resnet20", (3, 32, 32), 10, norm="batch")
    program, _ = models.compile(model)
    memory = planned_bp_bytes(program, 1, momentum=True)
    assert memory.parameters - memory.gradients == 4 * program.n_stats == 4 * 1_568
    assert memory.gradients == memory.optimiser == 4 * 272_474


def test_pruning_saves_backpropagation_nothing() -> None:
    model = models.build("lenet5", (3, 32, 32), 10)
    dense, _ = models.compile(model)
    pruned, _ = models.compile(model, random_mask(model, 0.1))
    assert pruned.n_live < dense.n_live / 5
    assert planned_bp_bytes(pruned, 32, True) == planned_bp_bytes(dense, 32, True)

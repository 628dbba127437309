"""A torch process that trains a program's dense model, for its memory to be measured.

As lean as torch allows: one thread, and the optimiser by hand (importing torch's own would take another 75 MB).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foreseed.device.measured import peak_bytes
from foreseed.engine.program import Act, Kind, Op, Pool, Program, unknown

_STEPS = 3
_WHERE = "the process that is measured backpropagating"


def main() -> None:
    """Train a program (a file) for a few steps with minibatches of so many images, and print the peak in bytes."""
    torch.set_num_threads(1)
    program, batch = Program(Path(sys.argv[1]).read_bytes()), int(sys.argv[2])
    shapes = program.shapes()
    net = [_parameters(op, shapes[op.a][0]) for op in program.ops]
    trained = [p for parameters in net for p in parameters]
    velocities = [torch.zeros_like(p) for p in trained]
    images = torch.zeros(batch, *program.input_shape)
    for _ in range(_STEPS):
        loss = F.cross_entropy(logits(program, net, images), torch.zeros(batch, dtype=torch.int64))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for p, v in zip(trained, velocities, strict=True):
                assert p.grad is not None
                p.sub_(v.mul_(0.9).add_(p.grad), alpha=0.01)
                p.grad.zero_()
    print(peak_bytes())


def _parameters(op: Op, channels: int) -> list[Tensor]:
    """The dense parameters of an op: a weight and perhaps a bias."""
    shapes: list[tuple[int, ...]] = []
    if op.kind is Kind.CONV:
        shapes = [(op.channels, channels // op.groups, *op.window[:2]), (op.channels,)][: 1 + op.has_parameters]
    elif op.kind is Kind.NORM and op.has_parameters:
        shapes = [(channels,), (channels,)]
    return [(0.01 * torch.randn(shape)).requires_grad_() for shape in shapes]


def logits(program: Program, net: list[list[Tensor]], images: Tensor) -> Tensor:
    """The logits of images; `net` holds the parameters of every op."""
    last_use = {tensor: i for i, op in enumerate(program.ops) for tensor in (op.a, op.b)}
    tensors = {0: images}
    for i, (op, parameters) in enumerate(zip(program.ops, net, strict=True)):
        x = _compute(op, tensors[op.a], tensors[op.b], *parameters)
        x = _pool(op, _activate(op, x))
        tensors = {tensor: value for tensor, value in tensors.items() if last_use[tensor] > i} | {i + 1: x}
    return x.flatten(1)


def _compute(op: Op, x: Tensor, other: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """An op without its activation and its pool."""
    if op.kind is Kind.CONV:
        assert weight is not None
        kernel, stride, padding = op.window[:2], op.window[2:4], op.window[4:]
        if x.shape[2:] == kernel and padding == (0, 0) and op.groups == 1:
            return F.linear(x.flatten(1), weight.flatten(1), bias)[..., None, None]
        return F.conv2d(x, weight, bias, stride, padding, groups=op.groups)
    if op.kind is Kind.NORM:
        if op.groups:
            return F.group_norm(x, op.groups, weight, bias, op.eps)
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=op.eps)
    if op.kind is Kind.ADD:
        return x + other
    if op.kind in (Kind.POOL, Kind.ACT):
        return x
    raise unknown("op kind", op.kind, _WHERE)


def _activate(op: Op, x: Tensor) -> Tensor:
    if op.act is Act.NONE:
        return x
    if op.act is Act.RELU:
        return F.relu(x)
    if op.act is Act.HARDSWISH:
        return F.hardswish(x)
    raise unknown("activation", op.act, _WHERE)


def _pool(op: Op, x: Tensor) -> Tensor:
    if op.pool is Pool.NONE:
        return x
    kernel, stride, padding = op.pool_window[:2], op.pool_window[2:4], op.pool_window[4:]
    if op.pool is Pool.MAX:
        return F.max_pool2d(x, kernel, stride, padding)
    if op.pool in (Pool.AVERAGE, Pool.AVERAGE_INSIDE):
        return F.avg_pool2d(x, kernel, stride, padding, count_include_pad=op.pool is Pool.AVERAGE)
    raise unknown("pool", op.pool, _WHERE)

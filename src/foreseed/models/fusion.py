"""Join the ops of a traced model: a conv takes the activation and the pool that follow it, a norm its activation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torch import nn

from foreseed.engine.ops import SHARED, Act, Kind, Op, Pool, Shape
from foreseed.engine.parts import KINDS
from foreseed.engine.walker import reads
from foreseed.models.errors import ModelError, UnsupportedLayerError
from foreseed.models.layers import Step
from foreseed.models.trace import trace


def lower(model: nn.Module, input_shape: Shape) -> list[Step]:
    """The ops of a model as its program has them; the last makes the logits."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{type(model).__name__} given, expected a torch.nn.Module; build the model first")
    _check_input_shape(input_shape)
    steps = share(fuse(*trace(model, input_shape)))
    if not any(step.module is not None and list(step.module.parameters()) for step in steps):
        raise UnsupportedLayerError(f"{type(model).__name__} has no layer with parameters; there is nothing to train")
    if len(steps) > 256:
        raise UnsupportedLayerError(f"{type(model).__name__} makes {len(steps)} ops, a program has at most 256")
    return steps


def fuse(steps: Sequence[Step], result: int) -> list[Step]:
    """Drop what the result does not need, and join what follows a sole producer into one op."""
    uses = _uses(steps, result)
    fused: list[Step] = []
    place = {0: 0}
    for tensor, step in enumerate(steps, 1):
        if not uses[tensor]:
            continue
        a, b = place[step.op.a], place[step.op.b]
        joined = _join(fused[a - 1].op, step.op) if a and uses[step.op.a] == 1 else None
        if joined:
            fused[a - 1] = fused[a - 1]._replace(op=joined, shape=step.shape)
            place[tensor] = a
        else:
            fused.append(step._replace(op=replace(step.op, a=a, b=b)))
            place[tensor] = len(fused)
    return fused


def share(steps: Sequence[Step]) -> list[Step]:
    """Let every call of a layer use the values of its first."""
    owners: dict[int, int] = {}
    shared = []
    for number, step in enumerate(steps):
        op, owner = step.op, number
        if step.module is not None and list(step.module.parameters(recurse=False)):
            owner = owners.setdefault(id(step.module), number)
        if owner != number:
            if op.window[:2] != steps[owner].op.window[:2]:
                raise UnsupportedLayerError(
                    f"{step.name} reads flattened maps of two sizes, {op.window[:2]} and {steps[owner].op.window[:2]}; "
                    "give each call a layer of its own"
                )
            op = replace(op, flags=op.flags | SHARED, rice=owner)
        shared.append(step._replace(op=op))
    return shared


def _uses(steps: Sequence[Step], result: int) -> Counter[int]:
    """How often each tensor is read on the way to the result (which is itself read once)."""
    uses = Counter([result])
    for tensor in range(len(steps), 0, -1):
        if uses[tensor]:
            uses.update(reads(steps[tensor - 1].op))
    return uses


def _join(producer: Op, op: Op) -> Op | None:
    """Both as one op, if there is one that does the same."""
    takes = KINDS[producer.kind].fields
    if op.kind is Kind.POOL and "pool" in takes and not producer.pool:
        return replace(producer, pool=op.pool, pool_window=op.pool_window, flags=producer.flags | op.flags)
    # An op's activation comes before its pool; only a ReLU and a max pool may change places.
    in_order = not producer.pool or (producer.pool is Pool.MAX and op.act is Act.RELU)
    fits = "act" in takes and (op.act is not Act.LEAKY_RELU or "slope" in takes)
    if op.kind is Kind.ACT and fits and not producer.act and in_order:
        return replace(producer, act=op.act, slope=op.slope)
    return None


def _check_input_shape(shape: Shape) -> None:
    whole = isinstance(shape, tuple) and len(shape) == 3 and all(isinstance(n, int) and 1 <= n < 1 << 16 for n in shape)
    if not whole or shape[0] > 64 or prod(shape) > 1 << 28:
        raise ModelError(
            f"input_shape {shape}: expected a tuple (channels, height, width) of numbers from 1, at most 64 channels"
        )

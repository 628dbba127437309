"""Compile a torch model and a mask into a program and its values."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from foreseed.engine.ops import Shape
from foreseed.engine.parts import KINDS
from foreseed.engine.program import Program, assemble, check_finite
from foreseed.models.binding import Live, attach
from foreseed.models.errors import MaskError, ModelError
from foreseed.models.fusion import lower
from foreseed.models.layers import Step


def compile(
    model: nn.Module,
    mask: Mapping[str, Tensor] | None = None,
    *,
    input_shape: Shape = (3, 32, 32),
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[Program, array[float]]:
    """Give the program and the values of a model whose weights are pruned where `mask` is 0.

    `mask` maps names of Conv2d and Linear weights (`"conv1.weight"`) to tensors of 0 and 1; what it leaves out stays
    dense. `mean` and `std` normalise the pixels, per channel and in units of [0, 1]; each is 0.5 unless given. Dropout
    is left out. The model itself is only read.
    """
    steps = lower(model, input_shape)
    live = _live_weights(steps, mask or {})
    scale, shift = _normalisation(input_shape[0], mean, std)
    ops, names = [step.op for step in steps], [step.name for step in steps]
    program = assemble(input_shape, steps[-1].shape[0], scale, shift, ops, live, names)
    values = attach(program, steps, live).read()
    check_finite(values, f"the parameters of {type(model).__name__}")
    return program, values


def _live_weights(steps: Sequence[Step], mask: Mapping[str, Tensor]) -> list[Live]:
    weights = [f"{step.name}.weight" for step in steps if KINDS[step.op.kind].prunable]
    for name in mask:
        if name not in weights:
            near = get_close_matches(str(name), weights, n=1, cutoff=0)
            raise MaskError(
                f"mask {name!r}: the model uses no such Conv2d or Linear weight, and only those can be pruned; "
                f"did you mean {near[0]!r}?"
            )
    live: list[Live] = []
    for step in steps:
        own = KINDS[step.op.kind].prunable and step.op.owner is None
        tensor = mask.get(f"{step.name}.weight") if own else None
        live.append(None if tensor is None else _live_indices(step, tensor))
    return live


def _live_indices(step: Step, mask: Tensor) -> list[int]:
    assert step.module is not None
    weight = step.module.get_parameter("weight")
    name = f"mask '{step.name}.weight'"
    if not isinstance(mask, Tensor) or mask.shape != weight.shape:
        given = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise MaskError(f"{name}: {given} given, expected a tensor of the weight's shape {tuple(weight.shape)}")
    flat = mask.detach().cpu().reshape(-1)
    strange = flat[(flat != 0) & (flat != 1)]
    if strange.numel():
        raise MaskError(f"{name}: holds {strange[0].item()}, expected 0 (pruned) and 1 (live) only; threshold it first")
    indices = torch.nonzero(flat).reshape(-1)
    if not indices.numel():
        raise MaskError(f"{name}: prunes all {flat.numel()} weights of the layer; keep at least one")
    return list(indices.tolist())


def _normalisation(
    channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[list[float], list[float]]:
    """Scale and shift that take a pixel byte to (byte / 255 - mean) / std."""
    means = [0.5] * channels if mean is None else [float(m) for m in mean]
    stds = [0.5] * channels if std is None else [float(s) for s in std]
    sane = all(-1e6 < m < 1e6 for m in means) and all(1e-6 < s < 1e6 for s in stds)
    if not len(means) == len(stds) == channels or not sane:
        raise ModelError(
            f"mean {means}, std {stds}: expected a number for each of the {channels} channels, std above 0"
        )
    return [1 / (255 * s) for s in stds], [-m / s for m, s in zip(means, stds, strict=True)]

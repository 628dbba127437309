"""How long an iteration of NTK pruning takes: in float64 as it is done, beside float32, which moved masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from foreseed.bench.machine import describe_machine
from foreseed.bench.measure import Setup, interleaved
from foreseed.draws import Draws
from foreseed.engine.errors import ForeseedError
from foreseed.models import build
from foreseed.prune import Settings, dense_mask, ntk_rand
from foreseed.prune.saliency import Batch, draw_pair, mask_gradient, working_copy

MODELS: dict[str, dict[str, Any]] = {
    "lenet5-relu": {"name": "lenet5", "activation": "relu"},
    "lenet5-hardswish": {"name": "lenet5", "activation": "hardswish"},
    "resnet20-group": {"name": "resnet20", "activation": "relu", "norm": "group"},
    "resnet20-batch": {"name": "resnet20", "activation": "relu", "norm": "batch"},
}
_SHAPE = (3, 32, 32)
_DEFAULTS = Settings(_SHAPE)
# What float32 loses in a difference of two networks' logits; another computation would be off by far more.
_TOLERANCE = 1e-2


def bench_prune(
    models: Sequence[str],
    seconds: float = 20.0,
    settings: Settings = _DEFAULTS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time the first iteration (all weights live) of these models, `seconds` for each; contenders take turns."""
    rows = []
    for name in models:
        progress(name)
        rows.append({"model": name, **_measure(build(in_shape=_SHAPE, classes=10, **MODELS[name]), seconds, settings)})
    return {
        "models": rows,
        "threads": torch.get_num_threads(),
        "settings": {"redraws": settings.redraws, "batch": settings.batch},
        "machine": describe_machine(),
    }


def parse_models(text: str | None) -> list[str]:
    """Names of models from a comma-separated list; without one, all."""
    names = list(MODELS) if text is None else text.split(",")
    for name in names:
        if name not in MODELS:
            raise ForeseedError(f"models {text!r}: no {name!r}; expected some of {','.join(MODELS)}")
    return names


def _measure(model: nn.Module, seconds: float, settings: Settings) -> dict[str, Any]:
    mask, threads = dense_mask(model), torch.get_num_threads()

    def float64(iterations: int) -> float | None:
        return [ntk_rand(model, mask, settings, 1).objective for _ in range(iterations)][-1]

    def float32(iterations: int) -> float:
        return [_float32_iteration(model, settings) for _ in range(iterations)][-1]

    def float32_alone(iterations: int) -> float:
        torch.set_num_threads(1)
        try:
            return float32(iterations)
        finally:
            torch.set_num_threads(threads)

    ours, theirs = float64(1), float32(1)
    if ours is None or abs(theirs / ours - 1) > _TOLERANCE:
        raise ForeseedError(f"the objective is {ours} in float64 and {theirs} in float32, so the times say nothing")
    ways = {
        "float64": Setup("as pruning does it", float64),
        "float32": Setup("torch's own convolutions and threads", float32),
        "float32, one thread": Setup("torch's own convolutions", float32_alone),
    }
    taken = {name: 1 / rate for name, rate in interleaved(ways, seconds).items()}
    return {"seconds": taken, "ratio": {name: taken["float64"] / taken[name] for name in ways if name != "float64"}}


def _float32_iteration(model: nn.Module, settings: Settings) -> float:
    """The same draws, one after the other, a batch at a time, in the layout that suits oneDNN; gives the objective."""
    work, mask, objective = working_copy(model, settings).float(), dense_mask(model), 0.0
    total = {name: torch.zeros(live.shape) for name, live in mask.items()}
    for draw in range(settings.redraws):
        draws = Draws(settings.seed, "ntk-rand", 1, draw)
        images = torch.from_numpy(draws.normals(settings.batch, *settings.input_shape))
        pair = draw_pair(work, mask, Batch(draws, images.contiguous(memory_format=torch.channels_last)), settings)
        value, gradients = mask_gradient(work, pair, pair.inputs)
        objective += value
        for name, gradient in gradients.items():
            total[name] += gradient
    return objective

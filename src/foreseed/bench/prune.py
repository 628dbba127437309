"""How long an iteration of NTK pruning takes, as it is done and as torch would do it, at several densities."""

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
from foreseed.prune import Mask, Settings, foresight, ntk_rand
from foreseed.prune.convolution import FewImagesAtATime
from foreseed.prune.saliency import CHUNK, Batch, draw_pair, mask_gradient, side_by_side, working_copy

MODELS: dict[str, dict[str, Any]] = {
    "lenet5-relu": {"name": "lenet5", "activation": "relu"},
    "lenet5-hardswish": {"name": "lenet5", "activation": "hardswish"},
    "resnet20-group": {"name": "resnet20", "activation": "relu", "norm": "group"},
    "resnet20-batch": {"name": "resnet20", "activation": "relu", "norm": "batch"},
}
_SHAPE = (3, 32, 32)
_STEPS = 5
"""Small ones to the mask of a density: its layers then have about the densities of a real one."""
# What float32 loses in a difference of two networks' logits; another computation would be off by far more.
_TOLERANCE = 1e-2


def bench_prune(
    models: Sequence[str],
    densities: Sequence[float] = (1.0,),
    seconds: float = 20.0,
    draws: int = 5,
    batch: int = 100,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time an iteration of these models under masks of these densities, `seconds` for each; contenders take turns."""
    settings, rows = Settings(_SHAPE, draws, batch=batch), []
    for name in models:
        model = build(in_shape=_SHAPE, classes=10, **MODELS[name])
        for density in densities:
            progress(f"{name}, density {density:g}")
            rows.append(
                {"model": name, "density": density, **_measure(model, _mask(model, density), seconds, settings)}
            )
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


def _mask(model: nn.Module, density: float) -> Mask:
    return foresight(model, density, input_shape=_SHAPE, iterations=_STEPS, redraws=1, batch=CHUNK).mask


def _measure(model: nn.Module, mask: Mask, seconds: float, settings: Settings) -> dict[str, Any]:
    threads = torch.get_num_threads()

    def live(iterations: int) -> float | None:
        return [ntk_rand(model, mask, settings, 1).objective for _ in range(iterations)][-1]

    def float64(iterations: int) -> float:
        return [_float64_iteration(model, mask, settings) for _ in range(iterations)][-1]

    def float32(iterations: int) -> float:
        return [_float32_iteration(model, mask, settings) for _ in range(iterations)][-1]

    def float32_alone(iterations: int) -> float:
        torch.set_num_threads(1)
        try:
            return float32(iterations)
        finally:
            torch.set_num_threads(threads)

    ours, others = live(1), (float64(1), float32(1))
    if ours is None or any(abs(theirs / ours - 1) > _TOLERANCE for theirs in others):
        raise ForeseedError(f"the objective is {ours} as pruning does it and {others} in torch: the times say nothing")
    ways = {
        "live weights": Setup("as pruning does it", live),
        "torch": Setup("float64, all weights, as pruning does it without the C engine", float64),
        "float32": Setup("torch's own convolutions and threads", float32),
        "float32, one thread": Setup("torch's own convolutions", float32_alone),
    }
    taken = {name: 1 / rate for name, rate in interleaved(ways, seconds).items()}
    ratio = {name: taken[name] / taken["live weights"] for name in ways if name != "live weights"}
    return {"seconds": taken, "ratio": ratio}


def _float64_iteration(model: nn.Module, mask: Mask, settings: Settings) -> float:
    """The same draws and threads, with torch's convolutions; gives the objective."""
    batches = [Batch(Draws(settings.seed, "ntk-rand", 1, draw), None) for draw in range(settings.redraws)]
    with side_by_side(working_copy(model, settings)) as each:
        pairs = each(lambda own, batch: draw_pair(own, mask, batch, settings, FewImagesAtATime), batches)
        chunks = [(pair, chunk) for pair in pairs for chunk in torch.split(pair.inputs, CHUNK)]
        return sum(value for value, _ in each(lambda own, of: mask_gradient(own, *of, FewImagesAtATime), chunks))


def _float32_iteration(model: nn.Module, mask: Mask, settings: Settings) -> float:
    """The same draws, one after the other, a batch at a time, in the layout that suits oneDNN; gives the objective."""
    work, objective = working_copy(model, settings).float(), 0.0
    for draw in range(settings.redraws):
        draws = Draws(settings.seed, "ntk-rand", 1, draw)
        images = torch.from_numpy(draws.normals(settings.batch, *settings.input_shape))
        pair = draw_pair(work, mask, Batch(draws, images.contiguous(memory_format=torch.channels_last)), settings)
        value, _ = mask_gradient(work, pair, pair.inputs)
        objective += value
    return objective

"""ERK: how many weights each layer keeps is decided by its shape, which ones by chance."""

from __future__ import annotations

import math

import torch
from torch import nn

from foreseed.draws import Draws
from foreseed.prune.cost import Cost
from foreseed.prune.masks import Mask
from foreseed.prune.saliency import Saliency, Settings


def erk(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """Erdős-Rényi-Kernel: a layer's density goes as (in + out + kernel) / (in x out x kernel), chance does the rest.

    RigL (Evci et al., ICML 2020, arXiv:1911.11134). There is nothing to rank: a weight scores 1 if it was drawn.
    """
    counts = erk_counts({name: tuple(live.shape) for name, live in mask.items()}, settings.density)
    scores = {}
    for name, live in mask.items():
        drawn = Draws(settings.seed, "erk", name).permutation(live.numel())[: counts[name]]
        score = torch.zeros(live.numel())
        score[torch.from_numpy(drawn)] = 1.0
        scores[name] = score.reshape(live.shape)
    return Saliency(scores, None, Cost())


def erk_counts(shapes: dict[str, tuple[int, ...]], density: float) -> dict[str, int]:
    """Live weights of each layer by its weights' shape: round(density x all) together, at least one each."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    keep = round(density * sum(sizes.values()))
    # One scale for all layers, but for those that would be more than dense: they are dense, and the others share more.
    dense: set[str] = set()
    while True:
        rest = keep - sum(sizes[name] for name in dense)
        scale = rest / max(1, sum(sum(shape) for name, shape in shapes.items() if name not in dense))
        wanted = {name: sizes[name] if name in dense else scale * sum(shape) for name, shape in shapes.items()}
        if not (over := {name for name in wanted if name not in dense and wanted[name] > sizes[name]}):
            break
        dense |= over
    counts = {name: max(1, math.floor(want)) for name, want in wanted.items()}
    # Whole numbers: what was cut off or added is made good one by one, where it is nearest to what was wanted.
    while (missing := keep - sum(counts.values())) != 0:
        step = 1 if missing > 0 else -1
        free = [name for name in counts if 1 <= counts[name] + step <= sizes[name]]
        name = max(free, key=lambda name: step * (wanted[name] - counts[name]))
        counts[name] += step
    return counts

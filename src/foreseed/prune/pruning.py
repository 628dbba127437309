"""Foresight pruning: the mask is found before training, in small steps (Algorithm 1, first half)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from foreseed.draws import Draws
from foreseed.prune.cost import Cost
from foreseed.prune.errors import PruneError
from foreseed.prune.masks import Mask, dense_mask, densities, keep_top
from foreseed.prune.saliency import Scorer, Settings, magnitude, ntk_ori, ntk_rand, uniform


class Pruner(NamedTuple):
    """A way to score weights."""

    score: Scorer
    iterative: bool
    """Scores change with the mask, so that many small steps differ from one."""


PRUNERS = {
    "ntk-rand": Pruner(ntk_rand, iterative=True),
    "ntk-ori": Pruner(ntk_ori, iterative=True),
    "random": Pruner(uniform, iterative=False),
    "magnitude": Pruner(magnitude, iterative=False),
}


@dataclass(frozen=True)
class Step:
    """What one pruning iteration did."""

    iteration: int
    iterations: int
    kept: int
    density: float
    objective: float | None
    """The NTK objective under the mask before this iteration; None for the controls."""


@dataclass(frozen=True)
class PruneResult:
    """A mask, how it came about, and what it cost."""

    mask: Mask
    densities: dict[str, float]
    """Share of live weights, layer by layer."""
    cost: Cost
    history: tuple[Step, ...]


def kept(n: int, density: float, iteration: int, iterations: int) -> int:
    """Weights of n that live after an iteration: the density falls by the same factor each time, to d^(t/T)."""
    return round(math.pow(density, iteration / iterations) * n)


def foresight(
    model: nn.Module,
    density: float,
    *,
    pruner: str = "ntk-rand",
    input_shape: tuple[int, ...],
    iterations: int = 50,
    redraws: int = 5,
    redraw_weights: bool = True,
    batch: int = 100,
    epsilon: float = 0.01,
    seed: int = 0,
    device_data: Iterable[torch.Tensor] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> PruneResult:
    """Choose which weights of an untrained model live, exactly round(density * n) of them; the model is not changed.

    `pruner` is a name of `PRUNERS`: "ntk-rand" needs no data; "ntk-ori" uses `device_data`, the normalised images
    of each device, and makes the devices backpropagate (see `ntk_ori`); "random" and "magnitude" are controls,
    done in one step. The other arguments are described at `Settings`. `progress` is called after each iteration.
    Equal arguments give the same mask on every machine; torch's global generator is neither read nor moved.
    """
    chosen = _pruner(pruner)
    data = None if device_data is None else tuple(device_data)
    settings = Settings(input_shape, redraws, redraw_weights, batch, epsilon, seed, data)
    mask = dense_mask(model)
    n = _checked_size(mask, density, iterations)
    if density == 1:
        return PruneResult(mask, densities(mask), Cost(), ())
    steps = iterations if chosen.iterative else 1
    cost = Cost(download_bytes=_bytes(model) if pruner == "ntk-ori" else 0)
    history: list[Step] = []
    for t in range(1, steps + 1):
        saliency = chosen.score(model, mask, settings, t)
        keep = kept(n, density, t, steps)
        mask = keep_top(saliency.scores, mask, keep, Draws(seed, "ties", pruner, t))
        cost += saliency.cost
        history.append(Step(t, steps, keep, keep / n, saliency.objective))
        if progress is not None:
            progress(history[-1])
    return PruneResult(mask, densities(mask), cost, tuple(history))


def _pruner(name: str) -> Pruner:
    if name not in PRUNERS:
        nearest = difflib.get_close_matches(name, PRUNERS, n=1, cutoff=0.0)[0]
        raise PruneError(f"unknown pruner {name!r}, expected one of {', '.join(PRUNERS)}; did you mean {nearest!r}?")
    return PRUNERS[name]


def _checked_size(mask: Mask, density: float, iterations: int) -> int:
    """The number of prunable weights, if density and iterations make sense for them."""
    n = sum(live.numel() for live in mask.values())
    if not n:
        raise PruneError("the model has no Conv2d or Linear weight, expected at least one; there is nothing to prune")
    if not 0 < density <= 1:
        raise PruneError(f"density is {density}, expected a share above 0 and at most 1 of the weights to keep")
    if iterations < 1:
        raise PruneError(f"iterations is {iterations}, expected at least 1")
    if kept(n, density, 1, 1) < len(mask):
        raise PruneError(
            f"density {density} keeps {kept(n, density, 1, 1)} of {n} weights, but each of the {len(mask)} layers "
            f"keeps at least one; expected a density of at least {len(mask) / n:.2g}"
        )
    return n


def _bytes(model: nn.Module) -> int:
    """Size of the initial model, which every device of ntk-ori receives once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())

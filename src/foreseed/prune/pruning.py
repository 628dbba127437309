"""Foresight pruning: the mask is found before training, in small steps (Algorithm 1, first half)."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from foreseed.draws import Draws
from foreseed.prune.cost import Cost, macs_per_weight
from foreseed.prune.errors import PruneError
from foreseed.prune.flow import synflow
from foreseed.prune.layerwise import erk
from foreseed.prune.masks import Mask, dense_mask, densities, keep_top
from foreseed.prune.saliency import Scorer, Settings, magnitude, ntk_ori, ntk_rand, uniform
from foreseed.prune.sensitivity import grasp, snip


class Pruner(NamedTuple):
    """A way to score weights."""

    score: Scorer
    iterative: bool
    """Scores change with the mask, so that many small steps differ from one; others take a single step."""
    asks: Literal["nothing", "images", "labels"] = "nothing"
    """What of their own the devices score by, which makes them backpropagate: images, or images with labels."""
    weighable: bool = True
    """A score is a size, which can be divided by what the weight costs."""


PRUNERS = {
    "ntk-rand": Pruner(ntk_rand, iterative=True),
    "ntk-ori": Pruner(ntk_ori, iterative=True, asks="images"),
    "snip": Pruner(snip, iterative=False, asks="labels"),
    "grasp": Pruner(grasp, iterative=False, asks="labels", weighable=False),
    "synflow": Pruner(synflow, iterative=True),
    "magnitude": Pruner(magnitude, iterative=False),
    "erk": Pruner(erk, iterative=False, weighable=False),
    "random": Pruner(uniform, iterative=False, weighable=False),
}


@dataclass(frozen=True)
class Step:
    """What one pruning iteration did."""

    iteration: int
    iterations: int
    kept: int
    density: float
    objective: float | None
    """What the pruner differentiates (`Saliency`), under the mask before this iteration; None for the controls."""


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
    device_labels: Iterable[torch.Tensor] | None = None,
    cost_power: float = 0.0,
    progress: Callable[[Step], None] | None = None,
) -> PruneResult:
    """Choose which weights of an untrained model live, exactly round(density * n) of them; the model is not changed.

    `pruner` is a name of `PRUNERS`. "ntk-rand" and "synflow" need no data. "ntk-ori", "snip" and "grasp" use
    `device_data`, the normalised images of each device, the last two also `device_labels`, and make the devices
    backpropagate (see `ntk_ori`). "magnitude", "erk" and "random" look at weights, at shapes, and at nothing. The NTK
    and SynFlow take `iterations` steps, all others one.

    With a `cost_power` p above 0 every score is divided by c^p, where c is how often the weight works for an input
    (once in a linear layer, once for each place of its map in a convolution): the mask then needs fewer FLOPs.

    The other arguments are described at `Settings`. `progress` is called after each iteration. Equal arguments give
    the same mask on every machine; torch's global generator is neither read nor moved.
    """
    chosen = _pruner(pruner)
    data, labels = (None if given is None else tuple(given) for given in (device_data, device_labels))
    settings = Settings(input_shape, redraws, redraw_weights, batch, epsilon, seed, data, labels, density)
    mask = dense_mask(model)
    n = _checked_size(mask, density, iterations)
    if density == 1:
        return PruneResult(mask, densities(mask), Cost(), ())
    price = _prices(model, pruner, cost_power, input_shape)
    steps = iterations if chosen.iterative else 1
    cost = Cost(download_bytes=0 if chosen.asks == "nothing" else _bytes(model))
    history: list[Step] = []
    for t in range(1, steps + 1):
        saliency = chosen.score(model, mask, settings, t)
        keep = kept(n, density, t, steps)
        scores = {name: score / price[name] for name, score in saliency.scores.items()} if price else saliency.scores
        mask = keep_top(scores, mask, keep, Draws(seed, "ties", pruner, t))
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


def _prices(model: nn.Module, pruner: str, power: float, input_shape: tuple[int, ...]) -> dict[str, float]:
    """What the scores of each layer are divided by; nothing, if costs do not count."""
    if not 0 <= power < math.inf:
        raise PruneError(f"cost_power is {power}, expected 0 or a positive number such as 0.5")
    if power == 0:
        return {}
    if not PRUNERS[pruner].weighable:
        able = ", ".join(name for name, one in PRUNERS.items() if one.weighable)
        raise PruneError(
            f"{pruner} has no scores that could be divided by a cost, expected cost_power 0 or one of {able}; "
            "choose one of them"
        )
    macs = macs_per_weight(copy.deepcopy(model).eval(), input_shape)
    return {name: math.pow(max(1, number), power) for name, number in macs.items()}


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
    """Size of the initial model, which every device that helps to score receives once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())

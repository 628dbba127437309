"""Saliencies of the loss on labelled images: SNIP and GraSP. Both make devices backpropagate, as `ntk_ori` does.

Each device differentiates the cross entropy of its own images and uploads what it finds, 32 bits a weight; the server
adds that up, so that every image counts alike. The model's own weights are scored; norms are in eval mode, as in the
public code of Tanaka et al. (2020), so that BatchNorm has the statistics that it starts with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from foreseed.prune.convolution import FewImagesAtATime
from foreseed.prune.cost import Cost, forward_flops
from foreseed.prune.errors import PruneError
from foreseed.prune.masks import Mask, Scores, prunable
from foreseed.prune.saliency import CHUNK, Saliency, Settings, checked_images, device_cost, logits_of, side_by_side

TEMPERATURE = 200.0
"""GraSP divides logits by it, so that the loss is scored near its steepest, where no class is preferred yet."""

_SNIP_PASSES = 3
"""Forward passes that SNIP costs an image: one, and a backward pass, which counts as two."""
_GRASP_PASSES = 12
"""GraSP's: a gradient (3), then another (3) and a backward pass through all of that (6)."""


class Examples(NamedTuple):
    """A few images of a device and their classes."""

    images: torch.Tensor
    labels: torch.Tensor


def snip(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """|w dL/dw|: how much the loss feels a weight's absence. SNIP (Lee et al., ICLR 2019, arXiv:1810.02340)."""
    examples, work, weights = _prepared("snip", model, mask, settings)
    gradient, loss = _summed(work, examples, lambda own, some: _gradient(own, weights, some, 1.0))
    flops = _SNIP_PASSES * forward_flops(work, settings.input_shape)
    cost = device_cost(mask, settings.device_data or (), flops)
    return Saliency({name: (weights[name] * g).abs() for name, g in gradient.items()}, loss, cost)


def grasp(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """w (Hg): what the gradient's norm owes to a weight. GraSP (Wang et al., ICLR 2020, arXiv:2002.07376).

    Without the weight, |g|^2 changes by -2 w (Hg), to first order; the paper prunes where -w (Hg) is highest, so that
    gradients flow on. A device is asked twice: for its gradient, then for its part of Hg, with the sum g of all
    gradients, which it receives. Scores have signs.
    """
    examples, work, weights = _prepared("grasp", model, mask, settings)
    gradient, _ = _summed(work, examples, lambda own, some: _gradient(own, weights, some, TEMPERATURE))
    product, norm = _summed(work, examples, lambda own, some: _hessian_product(own, weights, some, gradient))
    flops = _GRASP_PASSES * forward_flops(work, settings.input_shape)
    second = 4 * sum(live.numel() for live in mask.values())
    cost = device_cost(mask, settings.device_data or (), flops) + Cost(upload_bytes=second, download_bytes=second)
    return Saliency({name: weights[name] * h for name, h in product.items()}, norm, cost)


def _prepared(
    pruner: str, model: nn.Module, mask: Mask, settings: Settings
) -> tuple[list[Examples], nn.Module, Scores]:
    """All devices' images in pieces, a frozen float64 copy of the model, and its masked weights."""
    devices = checked_images(pruner, settings)
    labels = _checked_labels(pruner, devices, settings.device_labels)
    pieces = [
        Examples(images[at : at + CHUNK].double(), classes[at : at + CHUNK].long())
        for images, classes in zip(devices, labels, strict=True)
        for at in range(0, len(images), CHUNK)
    ]
    work = copy.deepcopy(model).double().eval().requires_grad_(False)
    weights = {name: layer.weight * mask[name] for name, layer in prunable(work).items()}
    return pieces, work, weights


def _checked_labels(
    pruner: str, devices: Sequence[torch.Tensor], given: Sequence[torch.Tensor] | None
) -> Sequence[torch.Tensor]:
    if given is None or len(given) != len(devices):
        found = "none" if given is None else f"those of {len(given)} devices"
        raise PruneError(
            f"{pruner} needs the labels of the images of {len(devices)} devices, and was given {found}; "
            "pass device_labels, a tensor for each of device_data"
        )
    for number, (images, labels) in enumerate(zip(devices, given, strict=True)):
        if labels.shape != (len(images),) or labels.is_floating_point():
            raise PruneError(
                f"labels of device {number}: {labels.dtype} of shape {tuple(labels.shape)}, expected one integer for "
                f"each of its {len(images)} images"
            )
    return given


def _summed(
    work: nn.Module, examples: Sequence[Examples], part: Callable[[nn.Module, Examples], tuple[float, Scores]]
) -> tuple[Scores, float]:
    """The parts of all pieces, added up in their order, whoever is done first."""
    total = {name: torch.zeros_like(layer.weight) for name, layer in prunable(work).items()}
    number = 0.0
    with side_by_side(work) as each:
        for value, found in each(part, examples):
            number += value
            for name, some in found.items():
                total[name] += some
    return total, number


def _loss(work: nn.Module, weights: Scores, some: Examples, temperature: float) -> torch.Tensor:
    """Cross entropy, added up over images: devices of more images then count for more, as in a mean over all."""
    with FewImagesAtATime():
        logits = logits_of(work, weights, some.images)
    return functional.cross_entropy(logits / temperature, some.labels, reduction="sum")


def _gradient(work: nn.Module, weights: Scores, some: Examples, temperature: float) -> tuple[float, Scores]:
    here = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    loss = _loss(work, here, some, temperature)
    gradients = torch.autograd.grad(loss, list(here.values()), materialize_grads=True)
    return loss.item(), dict(zip(here, gradients, strict=True))


def _hessian_product(work: nn.Module, weights: Scores, some: Examples, vector: Scores) -> tuple[float, Scores]:
    """H times a vector, and the product of the vector with the gradient: a piece's part of |g|^2, if g is given."""
    here = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    loss = _loss(work, here, some, TEMPERATURE)
    gradients = torch.autograd.grad(loss, list(here.values()), create_graph=True, materialize_grads=True)
    along = torch.stack([(vector[name] * g).sum() for name, g in zip(here, gradients, strict=True)]).sum()
    products = torch.autograd.grad(along, list(here.values()), materialize_grads=True)
    return along.item(), dict(zip(here, products, strict=True))

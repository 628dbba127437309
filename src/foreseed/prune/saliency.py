"""How much each weight matters to the training dynamics, before any training: the NTK saliency (Eqs. 13 to 15).

The trace of the neural tangent kernel is approximated by how far the logits move under a small random change of
the weights, F = ||f(x; W*m) - f(x; (W + dW)*m)||^2; a weight's saliency is |dI/dm| of the mean I of F.

A mask must be the same on every machine. So everything is drawn from `Draws`, and computed in float64: kernels of
different CPUs add in different orders, but there that moves a score by some 1e-14 of itself, far less than the gaps
between ranks (`keep_top` says what happens to scores that are closer). In float32 it moved masks.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from foreseed.draws import Draws
from foreseed.prune.convolution import FewImagesAtATime
from foreseed.prune.cost import Cost, forward_flops
from foreseed.prune.errors import PruneError
from foreseed.prune.masks import Mask, Scores, prunable

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Settings:
    """How saliencies are estimated."""

    input_shape: tuple[int, ...]
    """Channels, height and width of one input."""
    redraws: int = 5
    """Monte Carlo draws an iteration. One draw scores the weights of dead ReLU units exactly zero; five cure it."""
    redraw_weights: bool = True
    """Draw fresh weights each time, which scores the architecture; False scores the model's own weights."""
    batch: int = 100
    """Inputs of a draw: Gaussian ones, or the most that a device takes at a time."""
    epsilon: float = 0.01
    """Standard deviation of the weights' random change; the ranking hardly depends on it."""
    seed: int = 0
    device_data: Sequence[torch.Tensor] | None = None
    """Normalised float images of each device, N x input_shape; read by `ntk-ori`, `snip` and `grasp` alone."""
    device_labels: Sequence[torch.Tensor] | None = None
    """Their classes, N integers for each device; read by `snip` and `grasp` alone."""
    density: float = 1.0
    """The share of weights that will live in the end; read by `erk` alone."""

    def __post_init__(self) -> None:
        for name in ("redraws", "batch"):
            if getattr(self, name) < 1:
                raise PruneError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 0 < self.epsilon < math.inf:
            raise PruneError(f"epsilon is {self.epsilon}, expected a positive standard deviation such as 0.01")


class Saliency(NamedTuple):
    """Scores of one pruning iteration."""

    scores: Scores
    objective: float | None
    """What the pruner differentiates, such as the sum of F over inputs and draws; None where there is no such thing."""
    cost: Cost


Scorer: TypeAlias = Callable[[nn.Module, Mask, Settings, int], Saliency]
"""Scores the weights of a model under a mask, for iteration t = 1, 2, ..."""

CHUNK = 20
"""Inputs that pass the networks at a time: five draws of a hundred are 25 pieces of work to share out over cores."""

_DRAWN_AT_A_TIME = 10
"""Draws whose weights are in memory at a time."""


class Batch(NamedTuple):
    """Inputs of one Monte Carlo draw, and where its random numbers come from."""

    draws: Draws
    images: torch.Tensor | None
    """A device's; None = Gaussian ones, drawn when their turn comes."""


@contextmanager
def side_by_side(work: nn.Module) -> Iterator[Callable[[Callable[[nn.Module, T], R], Iterable[T]], Iterator[R]]]:
    """Yields a map over pieces of work, each done with a network of its own; results come in the pieces' order.

    torch's threads are taken from inside its kernels to work on a piece each.
    """
    mine = threading.local()

    def own() -> nn.Module:
        if not hasattr(mine, "work"):  # a call puts other weights into the network, so each thread has its own
            mine.work = copy.deepcopy(work)
        network: nn.Module = mine.work
        return network

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield lambda do, pieces: pool.map(lambda piece: do(own(), piece), pieces)
    finally:
        torch.set_num_threads(threads)


def ntk_rand(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """NTK saliency on Gaussian inputs: no data, no labels, no devices; the server does it all."""
    batches = [Batch(Draws(settings.seed, "ntk-rand", iteration, draw), None) for draw in range(settings.redraws)]
    work = working_copy(model, settings)
    flops = settings.redraws * settings.batch * _objective_flops(work, settings.input_shape)
    scores, objective = _accumulate(work, mask, batches, settings)
    return Saliency(scores, objective, Cost(server_flops=flops))


def ntk_ori(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """NTK saliency on the devices' own images. This is NOT backpropagation-free: every device must backpropagate.

    The paper lets devices send the number F_i and the server differentiate it, but a number has no gradient. So
    each device computes the gradient of its F_i with respect to the mask by autograd and uploads it, 32 bits for
    each prunable weight in every iteration; the server adds the signed gradients of all devices and then takes
    the absolute value. The cost returned is that of one iteration: the upload, the mask's bits as the download,
    and the FLOPs of the passes, forward and backward, over all the device's images.
    """
    devices = checked_images("ntk-ori", settings)
    batches = [
        Batch(Draws(settings.seed, "ntk-ori", iteration, device, draw, at), images[at : at + settings.batch])
        for device, images in enumerate(devices)
        for draw in range(settings.redraws)
        for at in range(0, len(images), settings.batch)
    ]
    work = working_copy(model, settings)
    flops = settings.redraws * _objective_flops(work, settings.input_shape)
    cost = device_cost(mask, devices, flops)
    scores, objective = _accumulate(work, mask, batches, settings)
    return Saliency(scores, objective, cost)


def magnitude(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """The weights' own absolute values: a control."""
    return Saliency(
        {name: layer.weight.detach().abs().double() for name, layer in prunable(model).items()}, None, Cost()
    )


def uniform(model: nn.Module, mask: Mask, settings: Settings, iteration: int) -> Saliency:
    """Nothing to choose between the weights, so that the tie-break alone decides, at random: a control."""
    return Saliency({name: torch.zeros(live.shape) for name, live in mask.items()}, None, Cost())


def checked_images(pruner: str, settings: Settings) -> Sequence[torch.Tensor]:
    """The images of every device, if a pruner can use them."""
    devices = settings.device_data or ()
    for number, images in enumerate(devices):
        if tuple(images.shape[1:]) != tuple(settings.input_shape) or not images.is_floating_point():
            raise PruneError(
                f"data of device {number}: {images.dtype} of shape {tuple(images.shape)}, expected normalised "
                f"floats of shape (images, {', '.join(map(str, settings.input_shape))})"
            )
    if not any(len(images) for images in devices):
        raise PruneError(f"{pruner} was given no device's images; pass device_data, or use ntk-rand, which needs none")
    return devices


def device_cost(mask: Mask, devices: Sequence[torch.Tensor], flops: int) -> Cost:
    """What scoring costs devices that spend these FLOPs an image: a gradient up, in 32 bits a weight, the mask down."""
    weights = sum(live.numel() for live in mask.values())
    return Cost(0, tuple(flops * len(images) for images in devices), 4 * weights, (weights + 7) // 8)


def working_copy(model: nn.Module, settings: Settings) -> nn.Module:
    """A frozen float64 copy in eval mode: scoring leaves the model as it was and draws nothing from dropout."""
    work = copy.deepcopy(model).double().eval().requires_grad_(False)
    for module in work.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0
        if settings.redraw_weights and isinstance(module, _BatchNorm | nn.GroupNorm | nn.LayerNorm):
            if module.weight is not None:
                module.weight.fill_(1.0)
            if module.bias is not None:
                module.bias.zero_()
    return work


def _objective_flops(work: nn.Module, input_shape: tuple[int, ...]) -> int:
    """FLOPs of the objective and its gradient for one input: two networks forward and backward, and the BN pass."""
    passes = 7 if any(isinstance(module, _BatchNorm) for module in work.modules()) else 6
    return passes * forward_flops(work, input_shape)


def _accumulate(work: nn.Module, mask: Mask, batches: Sequence[Batch], settings: Settings) -> tuple[Scores, float]:
    """|sum of the signed mask gradients of all batches|, and the sum of their objectives.

    Signs must survive until the end: the saliency is the size of the mean gradient, not the mean of the sizes.
    Chunks of the batches are worked on side by side, and added up in their order.
    """
    total = {name: torch.zeros_like(layer.weight) for name, layer in prunable(work).items()}
    objective = 0.0
    with side_by_side(work) as each:
        for at in range(0, len(batches), _DRAWN_AT_A_TIME):
            some = batches[at : at + _DRAWN_AT_A_TIME]
            pairs = list(each(lambda own, batch: draw_pair(own, mask, batch, settings), some))
            chunks = [(pair, chunk) for pair in pairs for chunk in torch.split(pair.inputs, CHUNK)]
            for value, gradients in each(lambda own, of: mask_gradient(own, *of), chunks):
                objective += value
                for name, gradient in gradients.items():
                    total[name] += gradient
    return {name: gradient.abs() for name, gradient in total.items()}, objective


class Pair(NamedTuple):
    """The two networks of a draw, whose logits are compared, and their inputs."""

    inputs: torch.Tensor
    weights: dict[str, torch.Tensor]
    moved: dict[str, torch.Tensor]
    gates: dict[str, torch.Tensor]
    """The mask that both share, as numbers."""
    buffers: dict[str, torch.Tensor]
    """Such as BatchNorm's statistics, which both share."""


def draw_pair(work: nn.Module, mask: Mask, batch: Batch, settings: Settings) -> Pair:
    """The networks and inputs of one draw, in the precision of the working copy."""
    draws, images = batch
    layers = prunable(work)
    dtype = next(iter(layers.values())).weight.dtype

    def normals(shape: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(draws.normals(*shape)).to(dtype)

    inputs = normals((settings.batch, *settings.input_shape)) if images is None else images.to(dtype)
    weights: dict[str, torch.Tensor] = {name: layer.weight for name, layer in layers.items()}
    if settings.redraw_weights:  # of variance 2 / fan-in
        weights = {name: normals(w.shape) * math.sqrt(2 / w[0].numel()) for name, w in weights.items()}
    moved = {name: weight + settings.epsilon * normals(weight.shape) for name, weight in weights.items()}
    gates = {name: mask[name].to(dtype) for name in weights}
    _settle_batch_norms(work, {name: weights[name] * gates[name] for name in weights}, inputs)
    buffers = {name: buffer.clone() for name, buffer in work.named_buffers()}
    return Pair(inputs, weights, moved, gates, buffers)


def logits_of(work: nn.Module, weights: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """What a network says of images with other weights in the place of its own."""
    # A layer that stands in the model twice is named once; to tie its names would leave a tensor in its place.
    logits: torch.Tensor = functional_call(work, weights, (images,), tie_weights=False)
    return logits


def mask_gradient(work: nn.Module, pair: Pair, chunk: torch.Tensor) -> tuple[float, Scores]:
    """F of some inputs and its gradient with respect to the mask that both networks share (Eq. 13)."""
    gates = {name: gate.clone().requires_grad_() for name, gate in pair.gates.items()}
    here, there = (
        {name: weights[name] * gate for name, gate in gates.items()} | pair.buffers
        for weights in (pair.weights, pair.moved)
    )
    with FewImagesAtATime():
        change = logits_of(work, here, chunk) - logits_of(work, there, chunk)
    objective = change.square().sum()
    # A layer that the forward pass never uses has no gradient; zeros let it rank last.
    gradients = torch.autograd.grad(objective, list(gates.values()), materialize_grads=True)
    return objective.item(), dict(zip(gates, gradients, strict=True))


def _settle_batch_norms(work: nn.Module, weights: dict[str, torch.Tensor], images: torch.Tensor) -> None:
    """Give every BatchNorm the statistics of these images, which both networks then share.

    With its own batch statistics each network would undo part of the change that is to be measured.
    """
    norms = [module for module in work.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
    with torch.no_grad(), FewImagesAtATime():
        logits_of(work, weights, images)
    for norm in norms:
        norm.eval()

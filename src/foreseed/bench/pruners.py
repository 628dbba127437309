"""What pruners leave of a net at high compression: accuracy after training, as SynFlow's authors compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from foreseed.bench.machine import describe_machine
from foreseed.data import load
from foreseed.draws import Draws
from foreseed.engine.errors import ForeseedError
from foreseed.prune import PRUNERS, Mask, apply_mask, foresight, prunable

WIDTHS = (16, 16, 32, 32, 128, 128)
"""A small VGG: wide where maps are small, so that weights are small there too, and magnitude prunes all of them."""
_SHAPE = (3, 8, 8)
_SYNFLOW_STEPS, _NTK_STEPS = 100, 20
_SCORED = 100
"""Images that SNIP, GraSP and NTK-Ori score by: ten a class, as SynFlow's authors give them."""
_BATCH, _RATE = 64, 0.1


def bench_pruners(
    pruners: Sequence[str],
    densities: Sequence[float],
    seeds: Sequence[int],
    epochs: int = 12,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Prune an untrained net, train what is left on digits by backpropagation, and test it, with every seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are so small that threads would wait for each other
    try:
        rows = _rows(pruners, densities, seeds, epochs, progress)
    finally:
        torch.set_num_threads(threads)
    return {"rows": rows, "seeds": list(seeds), "epochs": epochs, "machine": describe_machine()}


def _rows(
    pruners: Sequence[str],
    densities: Sequence[float],
    seeds: Sequence[int],
    epochs: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    train, test = _digits()
    rows = []
    for density in densities:
        for pruner in pruners:
            accuracies = []
            for seed in seeds:
                progress(f"{pruner}, density {density:g}, seed {seed}")
                model = vgg(seed)
                mask = _mask(model, pruner, density, seed, train)
                accuracies.append(_accuracy(_trained(model, mask, seed, epochs, train), test))
            rows.append({
                "density": density, "pruner": pruner, "accuracies": accuracies, "mean": float(np.mean(accuracies)),
                "std": float(np.std(accuracies, ddof=1)) if len(seeds) > 1 else None,
            })  # fmt: skip
    return rows


def parse_pruners(text: str) -> list[str]:
    """Names of pruners from a comma-separated list."""
    names = text.split(",")
    for name in names:
        if name not in PRUNERS:
            raise ForeseedError(f"pruners {text!r}: no {name!r}; expected some of {','.join(PRUNERS)}")
    return names


def parse_densities(text: str) -> list[float]:
    """Shares of weights from a comma-separated list."""
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ForeseedError(f"densities {text!r}: expected shares above 0 and at most 1, such as 0.02,0.01")
    return shares


def vgg(seed: int) -> nn.Sequential:
    """Six convolutions with BatchNorm and a classifier; weights of variance 2 / fan-in."""
    layers: list[nn.Module] = []
    channels = _SHAPE[0]
    for number, width in enumerate(WIDTHS):
        # The first sees 5x5 pixels, so that a random mask of one in a hundred keeps some of its weights.
        kernel = 3 if number else 5
        convolution = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number % 2 else []
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10, bias=False))
    with torch.no_grad():
        for name, layer in prunable(model).items():
            drawn = torch.from_numpy(Draws(seed, "bench pruners", name).normals(*layer.weight.shape))
            layer.weight.copy_(drawn * (2 / layer.weight[0].numel()) ** 0.5)
    return model


Examples = tuple[torch.Tensor, torch.Tensor]


def _digits() -> tuple[Examples, Examples]:
    """Training and test images of 8x8 pixels, which is what digits were scanned as, and their labels."""
    data = load("digits")

    def examples(images: Any, labels: Any) -> Examples:
        pixels = functional.avg_pool2d(torch.from_numpy(images).float() / 255, images.shape[-1] // _SHAPE[-1])
        return 2 * pixels - 1, torch.from_numpy(labels.astype(np.int64))

    return examples(data.train_images, data.train_labels), examples(data.test_images, data.test_labels)


def _mask(model: nn.Module, pruner: str, density: float, seed: int, train: Examples) -> Mask:
    """A mask as its paper finds it: SynFlow's in 100 steps, the NTK's in 20, all others in one."""
    some = torch.from_numpy(Draws(seed, "scored").permutation(len(train[0]))[:_SCORED])
    return foresight(
        model, density, pruner=pruner, input_shape=_SHAPE, seed=seed, device_data=[train[0][some]],
        device_labels=[train[1][some]], iterations=_SYNFLOW_STEPS if pruner == "synflow" else _NTK_STEPS,
    ).mask  # fmt: skip


def _trained(model: nn.Module, mask: Mask, seed: int, epochs: int, train: Examples) -> nn.Module:
    """The pruned model after SGD with momentum, its rate going up and down once."""
    images, labels = train
    model = apply_mask(model, mask).train()
    layers = prunable(model)
    sgd = torch.optim.SGD(model.parameters(), _RATE, momentum=0.9, weight_decay=1e-4)
    steps = epochs * -(-len(images) // _BATCH)
    rate = torch.optim.lr_scheduler.OneCycleLR(sgd, _RATE, total_steps=steps)
    for epoch in range(epochs):
        order = torch.from_numpy(Draws(seed, "epoch", epoch).permutation(len(images)))
        for batch in torch.split(order, _BATCH):
            sgd.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            sgd.step()
            rate.step()
            with torch.no_grad():
                for name, layer in layers.items():
                    layer.weight.mul_(mask[name])
    return model.eval()


def _accuracy(model: nn.Module, test: Examples) -> float:
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())

"""Masks, one a model and pruner, named by their hashes: `python -m tests.prune.everywhere` prints them as JSON.

What it prints must not depend on the machine, on torch's kernels or on the number of threads.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from foreseed.draws import Draws
from foreseed.models import build
from foreseed.prune import PRUNERS, Mask, foresight

SHAPE, SMALL = (3, 32, 32), (3, 16, 16)
MODELS = {
    "lenet5": {"name": "lenet5", "activation": "relu"},
    "lenet5 with hardswish": {"name": "lenet5", "activation": "hardswish"},
    "lenet5-wide": {"name": "lenet5-wide", "activation": "relu"},
    "resnet20 with GroupNorm": {"name": "resnet20", "activation": "relu", "norm": "group"},
    "resnet20 with BatchNorm": {"name": "resnet20", "activation": "relu", "norm": "batch"},
}


def digest(mask: Mask) -> str:
    """The name of a mask."""
    return hashlib.blake2b(b"".join(live.numpy().tobytes() for live in mask.values()), digest_size=16).hexdigest()


def masks(iterations: int) -> dict[str, str]:
    """Every model pruned by every pruner."""
    labels = [torch.arange(6), torch.arange(6) + 4]
    found = {}
    for model, options in MODELS.items():
        shape = SMALL if options.get("norm") == "batch" else SHAPE  # it takes the longest
        images = [torch.from_numpy(Draws(7, device).normals(6, *shape)) for device in range(2)]
        for pruner, power in [*((pruner, 0.0) for pruner in PRUNERS), ("synflow", 0.3)]:
            net = build(in_shape=shape, classes=10, seed=3, **options)
            result = foresight(
                net, 0.1, pruner=pruner, input_shape=shape, iterations=iterations, redraws=2, batch=6, seed=3,
                device_data=images, device_labels=labels, cost_power=power,
            )  # fmt: skip
            found[f"{model}, {pruner}" + (f" by cost^{power}" if power else "")] = digest(result.mask)
    return found


if __name__ == "__main__":
    iterations, threads, onednn = (int(word) for word in sys.argv[1:])
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = bool(onednn)  # type: ignore[assignment]
    print(json.dumps({"kernels": torch.backends.cpu.get_cpu_capability(), "masks": masks(iterations)}))

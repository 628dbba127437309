"""The models and masks that the benchmarks run."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from foreseed.engine.errors import ForeseedError
from foreseed.engine.program import Program
from foreseed.engine.types import Buffer, Samples
from foreseed.models import build, compile, restore

IMAGES = 500
"""What one of a hundred devices has of CIFAR-10."""

SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Spec:
    """A model, how dense each of its layers is left, and how the engine runs it best with a small second cache."""

    model: str
    densities: Mapping[str, float]
    """Density of the weights whose names start so; the others stay dense."""
    batch: int
    directions: int
    images: int = IMAGES
    """How many images a probe is timed on."""


# The densities that NTK foresight pruning left in LeNet-5: early layers nearly whole, the large linear ones bare.
_LENET5_90 = {"conv1": 0.744, "conv2": 0.70, "fc1": 0.071, "fc2": 0.042, "fc3": 0.408}
# The same shape for ResNet-20: it falls from block to block and keeps 10 % of all weights.
_RESNET20_90 = {
    "conv.": 0.6, "stage1.0": 0.6, "stage1.1": 0.5, "stage1.2": 0.4,
    "stage2.0": 0.30, "stage2.1": 0.22, "stage2.2": 0.165, "stage3": 0.04, "fc": 0.5,
}  # fmt: skip

CASES: Mapping[str, Spec] = {
    "lenet5-dense": Spec("lenet5", {}, batch=64, directions=4),
    "lenet5-90": Spec("lenet5", _LENET5_90, batch=64, directions=4),
    "resnet20-dense": Spec("resnet20", {}, batch=16, directions=1, images=256),
    "resnet20-90": Spec("resnet20", _RESNET20_90, batch=16, directions=1, images=256),
}


@dataclass(frozen=True)
class Case:
    """A benchmark's model, pruned and compiled, with the images that it is probed on."""

    name: str
    spec: Spec
    model: nn.Module
    mask: Mapping[str, Tensor]
    program: Program
    values: array[float]
    samples: Samples
    """The images as a device has them: records of a label and uint8 pixels."""
    images: Tensor
    """The same, normalised to float32: what a torch user would have prepared once."""
    labels: Tensor

    def dense(self, values: Buffer) -> Tensor:
        """All parameters of the model in one vector, pruned weights as 0."""
        restore(self.model, self.program, values)
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def dense_mask(self) -> Tensor:
        """1 for every parameter that lives, 0 for every pruned weight, in the order of `dense`."""
        named = self.model.named_parameters()
        return torch.cat([self.mask.get(name, torch.ones_like(p)).detach().reshape(-1) for name, p in named])


def parse_names(names: str | None) -> list[str]:
    """The cases of a comma-separated list; all of them without one."""
    if names is None:
        return list(CASES)
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in CASES:
            near = get_close_matches(name, CASES, n=1, cutoff=0)[0]
            raise ForeseedError(f"case {name!r}: expected one of {', '.join(CASES)}; did you mean {near!r}?")
    return chosen


def make_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A case's model, pruned, and its mask: the same every time."""
    model = build(CASES[name].model, SHAPE, 10, activation="relu", norm="group").eval()
    mask = _mask(model, CASES[name].densities)
    with torch.no_grad():
        for weight, live in mask.items():
            model.get_parameter(weight).mul_(live)
    return model, mask


def make_case(name: str, images: int = IMAGES) -> Case:
    """Build a case: the same model, mask and images every time."""
    model, mask = make_model(name)
    program, values = compile(model, mask)
    pixels, labels = _images(images)
    records = torch.cat([labels[:, None], pixels.reshape(images, -1)], dim=1).numpy().tobytes()
    scale, shift = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (program.scale, program.shift))
    samples = Samples.records(records, program.image_bytes)
    return Case(name, CASES[name], model, mask, program, values, samples, pixels * scale + shift, labels.long())


def _mask(model: nn.Module, densities: Mapping[str, float]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = {}
    for name, weight in model.named_parameters():
        density = _density(name, densities)
        if weight.dim() > 1 and density is not None:
            flat = torch.zeros(weight.numel())
            flat[torch.randperm(weight.numel(), generator=generator)[: round(density * weight.numel())]] = 1
            mask[name] = flat.view(weight.shape)
    return mask


def _density(name: str, densities: Mapping[str, float]) -> float | None:
    return next((density for start, density in densities.items() if name.startswith(start)), None)


def _images(count: int) -> tuple[Tensor, Tensor]:
    # Noise costs every contender the same as photographs would: no kernel here looks at the pixels.
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(0, 10, (count,), dtype=torch.uint8, generator=generator)

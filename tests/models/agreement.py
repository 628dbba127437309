"""What a compiled model must do: give torch's logits, in every engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from foreseed import models
from foreseed.engine import Engine
from foreseed.engine.program import Program
from foreseed.engine.reference import ReferenceEngine
from foreseed.engine.types import Samples

Mask = Mapping[str, Tensor]


@torch.no_grad()
def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and statistic a random value of its own, so that no two can be mistaken for each other."""
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        spread = p[0].numel() ** -0.5 if p.dim() > 1 else 0.3
        p.copy_(torch.randn(p.shape, generator=g) * spread + (0.5 if p.dim() == 1 else 0))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(module.num_features, generator=g) * 0.2)
            module.running_var.copy_(torch.rand(module.num_features, generator=g) + 0.5)
    return model


def random_mask(model: nn.Module, density: float, seed: int = 0) -> dict[str, Tensor]:
    """A mask over all Conv2d and Linear weights that keeps at least one weight of each."""
    g = torch.Generator().manual_seed(seed)
    mask = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            keep = torch.rand(module.weight.shape, generator=g) < density
            keep.view(-1)[int(torch.randint(keep.numel(), (1,), generator=g))] = True
            mask[f"{name}.weight"] = keep
    return mask


def shard(input_shape: tuple[int, int, int], count: int, seed: int = 0) -> np.ndarray:
    """Random images as records of a label byte (0) and the pixels."""
    records = np.random.default_rng(seed).integers(0, 256, (count, 1 + int(np.prod(input_shape))), dtype=np.uint8)
    records[:, 0] = 0
    return records


def torch_logits(model: nn.Module, program: Program, records: np.ndarray, mask: Mask | None = None) -> np.ndarray:
    """The logits of the masked model in whatever mode it is in; the model is left as it was."""
    shape = (-1, 1, 1)
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, *program.input_shape)).float()
    x = pixels * torch.tensor(program.scale).view(shape) + torch.tensor(program.shift).view(shape)
    weights = {name: model.get_parameter(name) * keep for name, keep in (mask or {}).items()}
    with torch.no_grad():
        return torch.func.functional_call(model, weights, (x,), tie_weights=False).numpy()


def assert_same_logits(
    model: nn.Module, mask: Mask | None = None, input_shape: tuple[int, int, int] = (3, 32, 32), count: int = 3
) -> Program:
    """Compile a scrambled model and compare its logits in both engines with torch's."""
    scramble(model).eval()
    program, values = models.compile(model, mask, input_shape=input_shape)
    stats = models.stats(model, program) or None
    records = shard(input_shape, count)
    expected = torch_logits(model, program, records, mask)
    for engine in (ReferenceEngine, Engine):
        logits = engine(program, batch=count).logits(values, Samples.records(records, program.image_bytes), stats)
        given = np.frombuffer(logits, np.float32).reshape(expected.shape)
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=2e-5 * max(1.0, float(np.abs(expected).max())))
    return program

"""The example of a model of one's own compiles, norms and all, and computes what torch does."""

import runpy
from pathlib import Path

import numpy as np
import torch

from foreseed.engine import Engine, Samples
from foreseed.models import compile

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet5_group.py"


def test_lenet5_with_group_norms_is_the_same_in_the_engine() -> None:
    model = runpy.run_path(str(EXAMPLE))["lenet5_group"]((3, 32, 32), 10, activation="hardswish", seed=3)
    program, values = compile(model)
    assert program.n_live == 62_006 + 2 * (6 + 16)  # a scale and a shift for each channel of both convs
    image = np.random.default_rng(1).integers(0, 256, program.image_bytes, np.uint8)
    loss, _ = Engine(program).loss(values, Samples.records(bytes([7]) + image.tobytes(), program.image_bytes))
    pixels = image.reshape(1, 3, 32, 32) * np.reshape(program.scale, (3, 1, 1)) + np.reshape(program.shift, (3, 1, 1))
    logits = model(torch.tensor(pixels, dtype=torch.float32))
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([7])).item()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

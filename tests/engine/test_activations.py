"""Activations are the same bits in every engine, on every instruction set, and close to what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.engine.native import NativeEngine, isas
from foreseed.engine.program import Act, Kind, Op, assemble
from foreseed.engine.reference import ReferenceEngine
from tests.engine.programs import records

SLOPE = float(np.float32(0.1))
EXACT = {
    Act.RELU: F.relu,
    Act.HARDSWISH: F.hardswish,
    Act.RELU6: F.relu6,
    Act.LEAKY_RELU: lambda x: F.leaky_relu(x, SLOPE),
    Act.HARDSIGMOID: F.hardsigmoid,
    Act.SIGMOID: torch.sigmoid,
    Act.SILU: F.silu,
    Act.TANH: torch.tanh,
    Act.GELU: F.gelu,
    Act.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}
WIDTH = 251
IMAGE = np.arange(WIDTH, dtype=np.uint8).reshape(1, 1, 1, WIDTH)


def results(act: Act, scale: float, shift: float) -> dict[str, np.ndarray]:
    """What each engine makes of pixels from `shift` on, `scale` apart, under a layer that only passes them on."""
    slope = SLOPE if act is Act.LEAKY_RELU else 0.0
    ops = [
        Op(Kind.ACT, 0, act=act, slope=slope),
        Op(Kind.CONV, 1, channels=WIDTH, groups=1, window=(1, WIDTH, 1, 1, 0, 0)),
    ]
    diagonal = [i * WIDTH + i for i in range(WIDTH)]
    program = assemble((1, 1, WIDTH), WIDTH, [scale], [shift], ops, [None, diagonal])
    ways = [(isa, lanes) for isa in isas() for lanes in (1, 4, 16)]
    engines = {f"{isa}, {lanes}": NativeEngine(program, batch=lanes, lanes=lanes, isa=isa) for isa, lanes in ways}
    ones, samples = np.ones(WIDTH, np.float32), records(IMAGE, np.zeros(1, np.uint8))
    everyone = engines | {"reference": ReferenceEngine(program)}
    return {name: np.asarray(engine.logits(ones, samples)) for name, engine in everyone.items()}


scales = st.floats(2**-20, 2.0, width=32)
starts = st.floats(-1.5, 0.5, width=32)


@pytest.mark.parametrize("act", list(EXACT))
@settings(max_examples=40, deadline=None)
@given(scale=scales, start=starts)
def test_every_engine_gives_the_same_bits_close_to_float64(act: Act, scale: float, start: float) -> None:
    shift = float(np.float32(start * scale * WIDTH))
    found = results(act, scale, shift)
    x = torch.from_numpy(IMAGE.reshape(-1) * np.float32(scale) + np.float32(shift)).double()
    exact = EXACT[act](x).numpy()
    for name, numbers in found.items():
        assert np.array_equal(numbers, found["reference"]), name
    # A few units in the last place of the larger of what goes in and what comes out.
    bound = 6 * 2.0**-24 * np.maximum(np.abs(exact), np.abs(x.numpy())) + 1e-37
    if act in (Act.SIGMOID, Act.HARDSIGMOID):
        bound = 6 * 2.0**-24 * np.maximum(1.0, np.abs(exact))
    assert np.all(np.abs(found["reference"] - exact) <= bound)


def test_all_activations_are_here() -> None:
    assert [Act.NONE, *EXACT] == list(Act)

"""Applying the update log: to the bit what `docs/protocol.md` says."""

from __future__ import annotations

import subprocess
import sys
from array import array
from typing import Any

import numpy as np
import pytest

from foreseed.engine import SHARED_DEVICE, Directions, ValuesError, direction
from foreseed.engine.update import apply_step, estimate, replay
from foreseed.wire import Update

N, SEED = 700, 2**50 + 3
F = np.float32

STEPS = {"sgd": (0, (0.1, 0.0, 0.01)), "momentum": (1, (0.1, 0.9, 0.01))}
STEPS["adam"] = (2, (0.1, 0.9, 0.99, 1e-8, 0.01, 2.5, 30.0))


def vector(seed: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(F)


def update(round: int, step: tuple[float, ...], devices: tuple[int, ...] = (4, 9, SHARED_DEVICE)) -> Update:
    parts = tuple((device, vector([round, device], 5).tobytes()) for device in devices)
    return Update(round, array("f", step).tobytes(), parts)


def estimated(entry: Update, kind: Any) -> np.ndarray:
    """g = g + c * z, each operation rounded to float32, device by device and k by k."""
    g = np.zeros(N, F)
    for device, coefficients in entry.parts:
        d = Directions(SEED, entry.round, device, count=5, kind=kind)
        for k, c in enumerate(np.frombuffer(coefficients, F)):
            g = g + c * np.array(direction(d, k, N), F)
    return g


def stepped(values: np.ndarray, buffers: list[np.ndarray], g: np.ndarray, step: tuple[float, ...]) -> list[np.ndarray]:
    """The formulas of the protocol in NumPy's float32."""
    constants = [F(x) for x in step]
    if len(constants) == 3:
        lr, mu, decay = constants
        d = g + decay * values
        if not buffers:
            return [values - lr * d]
        v = mu * buffers[0] + d
        return [values - lr * v, v]
    lr, beta1, beta2, eps, decay, k1, k2 = constants
    d = g + decay * values
    m = beta1 * buffers[0] + (F(1) - beta1) * d
    v = beta2 * buffers[1] + ((F(1) - beta2) * d) * d
    return [values - (lr * (m * k1)) / (np.sqrt(v * k2) + eps), m, v]


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_estimate_adds_coefficients_times_directions_in_the_order_of_the_log(kind: Any) -> None:
    entry, gradient = update(3, STEPS["sgd"][1]), np.zeros(N, F)
    estimate(gradient, entry, SEED, kind)
    np.testing.assert_array_equal(gradient, estimated(entry, kind))
    turned, other = Update(3, entry.step, entry.parts[::-1]), np.zeros(N, F)
    estimate(other, turned, SEED, kind)
    np.testing.assert_array_equal(other, estimated(turned, kind))


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_estimate_of_ranges_is_that_of_the_whole(kind: Any) -> None:
    entry, gradient = update(3, STEPS["sgd"][1]), np.zeros(N, F)
    for start, end in ((0, 1), (1, 130), (130, 513), (513, N)):
        estimate(gradient[start:end], entry, SEED, kind, start)
    np.testing.assert_array_equal(gradient, estimated(entry, kind))


@pytest.mark.parametrize("name", STEPS)
def test_step_is_the_protocols_to_the_bit(name: str) -> None:
    n_buffers, step = STEPS[name]
    values, gradient = vector(1), vector(2)
    buffers = [np.abs(vector(3 + i)) for i in range(n_buffers)]
    expected = stepped(values.copy(), [b.copy() for b in buffers], gradient, step)
    apply_step(values, buffers, gradient, array("f", step).tobytes())
    for found, wanted in zip((values, *buffers), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_replay_goes_round_by_round_in_any_buffer(name: str, kind: Any) -> None:
    n_buffers, step = STEPS[name]
    log = [update(round, (step[0] * 0.9**round, *step[1:])) for round in range(1, 5)]
    expected = [vector(1), *(np.zeros(N, F) for _ in range(n_buffers))]
    for entry in log:
        constants = tuple(array("f", entry.step))
        expected = stepped(expected[0], expected[1:], estimated(entry, kind), constants)
    values, buffers = array("f", vector(1).tobytes()), [array("f", bytes(4 * N)) for _ in range(n_buffers)]
    replay(values, buffers, log[:1], SEED, kind)
    replay(values, buffers, [], SEED, kind)
    replay(values, buffers, log[1:], SEED, kind)
    assert [v.tobytes() for v in (values, *buffers)] == [v.tobytes() for v in expected]


def test_momentum_without_its_vector_is_refused() -> None:
    values = vector(1)
    with pytest.raises(ValuesError, match="without a momentum vector"):
        apply_step(values, [], vector(2), array("f", STEPS["momentum"][1]).tobytes())
    np.testing.assert_array_equal(values, vector(1))


def test_replaying_loads_nothing_that_a_device_cannot_afford() -> None:
    code = "import sys, foreseed.engine.update; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-S", "-c", code], env=_path(), capture_output=True, text=True, check=True)
    assert "foreseed.engine.update" in loaded.stdout.split()
    assert not {"numpy", "torch", "typing", "dataclasses", "foreseed.wire"} & set(loaded.stdout.split())


def _path() -> dict[str, str]:
    # Without `site`, which loads some of what is looked for; so the places to import from are given by hand.
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}

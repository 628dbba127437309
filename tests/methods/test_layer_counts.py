"""Weights shared out over layers: exactly as many as there are, no layer beyond its size, none empty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.config import ConfigError
from foreseed.methods.layer_counts import share_out

LENET = {"conv1": (6, 3, 5, 5), "conv2": (16, 6, 5, 5), "fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84)}


def layers(*sizes: int) -> list[Any]:
    return [SimpleNamespace(name=f"layer{i}", size=size) for i, size in enumerate(sizes)]


@given(
    st.lists(st.tuples(st.integers(50, 5000), st.floats(0.1, 10)), min_size=1, max_size=8), st.floats(0.3, 1)
)  # fmt: skip
def test_the_total_is_kept_to_the_weight(given: list[tuple[int, float]], density: float) -> None:
    sizes, odds = zip(*given, strict=True)
    total = round(density * sum(sizes))
    counts = share_out(layers(*sizes), odds, total)
    assert sum(counts) == total
    assert all(0 < count <= size for count, size in zip(counts, sizes, strict=True))
    # A layer that has room is as dense as its odds say beside every other that has room.
    free = [i for i, size in enumerate(sizes) if counts[i] < size - 1]
    scales = [counts[i] / sizes[i] / odds[i] for i in free]
    slack = [1.01 / sizes[i] / odds[i] for i in free]
    assert all(abs(scales[0] - scale) <= slack[0] + more for scale, more in zip(scales, slack, strict=True))


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (0.2, [0.627286, 0.19809, 0.160948, 0.300673, 1.0]),
        (0.05, [0.150037, 0.04738, 0.038496, 0.071916, 0.397655]),
    ],
)
def test_erdos_renyi_kernel_is_the_public_codes(density: float, expected: list[float]) -> None:
    """Came out of `get_erdos_renyi_dist` of FedPruning/FedPruning, api/pruning/init_scheme.py, for LeNet-5's shapes."""
    sizes = [450, 2400, 48000, 10080, 840]
    odds = [sum(shape) / size for shape, size in zip(LENET.values(), sizes, strict=True)]
    counts = share_out(layers(*sizes), odds, round(density * sum(sizes)))
    assert [count / size for count, size in zip(counts, sizes, strict=True)] == pytest.approx(expected, abs=1.5e-3)


def test_a_layer_that_would_be_empty_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"10 of 10004 weights leave none for layer1 \(4\).*raise prune.density"):
        share_out(layers(10000, 4), [1.0, 1.0], 10)

"""ERK's densities: by hand, as RigL defines them, and exact for any shapes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.prune.layerwise import erk_counts


def test_by_hand_for_two_layers() -> None:
    # Shares of 90 live weights go as 10 + 20 + 3 + 3 to 100 + 80; the first layer has 1,800 weights, the other 8,000.
    counts = erk_counts({"conv": (10, 20, 3, 3), "linear": (80, 100)}, 90 / 9800)
    assert counts == {"conv": 15, "linear": 75}


def test_a_layer_that_would_be_more_than_dense_is_dense_and_the_others_share_the_rest() -> None:
    # 2 + 10 of 20 weights against 100 + 100 of 10,000: at a tenth, the small layer would have to keep 57 of its 20.
    assert erk_counts({"small": (2, 10), "large": (100, 100)}, 0.1) == {"small": 20, "large": 982}
    # The middle one is over only once the smallest is dense.
    shapes = {"a": (1, 3), "b": (4, 4), "c": (40, 40)}
    assert erk_counts(shapes, 180 / 1619) == {"a": 3, "b": 16, "c": 161}
    assert erk_counts(shapes, 1.0) == {"a": 3, "b": 16, "c": 1600}


@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=4).map(tuple), min_size=1, max_size=6),
    share=st.floats(0, 1),
)
def test_counts_are_exact_and_as_near_to_the_rule_as_whole_numbers_are(shapes, share) -> None:
    named = {str(i): shape for i, shape in enumerate(shapes)}
    total = sum(math.prod(shape) for shape in shapes)
    keep = len(shapes) + round(share * (total - len(shapes)))
    counts = erk_counts(named, keep / total)
    assert sum(counts.values()) == keep
    assert all(1 <= counts[name] <= math.prod(shape) for name, shape in named.items())
    # Among layers that are neither dense nor held up by their last weight, counts go as the sums of the shapes.
    free = [name for name, shape in named.items() if 1 < counts[name] < math.prod(shape)]
    scales = [(counts[name] - 1, counts[name] + 1, sum(named[name])) for name in free]
    assert all(low / size <= high / other for low, _, size in scales for _, high, other in scales)


@pytest.mark.parametrize("density", [0.05, 0.1, 0.3])
def test_densities_fall_with_a_layers_size(density) -> None:
    shapes = {"conv1": (6, 3, 5, 5), "conv2": (16, 6, 5, 5), "fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84)}
    counts = erk_counts(shapes, density)
    shares = {name: counts[name] / math.prod(shape) for name, shape in shapes.items()}
    assert shares["fc3"] > shares["conv1"] > shares["fc2"] > shares["conv2"] > shares["fc1"]

"""SynFlow: by hand on a net of five weights, and the law that no layer loses what flows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed.models import build
from foreseed.prune import Cost, Settings, dense_mask, synflow


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    model[2].weight.data = torch.tensor([[-4.0, 5.0]])
    return model


def test_by_hand() -> None:
    # A score is the product of the sizes along a path, summed over the paths through a weight: R = 3 x 4 + 3.5 x 5.
    found = synflow(two_layers(), dense_mask(two_layers()), Settings((2,)), 1)
    assert found.scores["0.weight"].tolist() == [[4.0, 8.0], [15.0, 2.5]]
    assert found.scores["2.weight"].tolist() == [[12.0, 17.5]]
    assert found.objective == 29.5
    assert found.cost == Cost(server_flops=3 * 2 * 6)


def test_what_is_pruned_lets_nothing_through() -> None:
    mask = {"0.weight": torch.tensor([[True, True], [True, False]]), "2.weight": torch.tensor([[False, True]])}
    scores = synflow(two_layers(), mask, Settings((2,)), 1).scores
    assert scores["0.weight"].tolist() == [[0.0, 0.0], [15.0, 0.0]]
    assert scores["2.weight"].tolist() == [[0.0, 15.0]]


ACTIVATIONS = [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.SiLU, nn.GELU, nn.Tanh]


@settings(max_examples=25, deadline=None)
@given(
    activation=st.sampled_from(ACTIVATIONS),
    norm=st.sampled_from([nn.Identity, lambda: nn.GroupNorm(2, 4), lambda: nn.LayerNorm((4, 4, 4))]),
    seed=st.integers(0, 2**32),
)
def test_every_layers_scores_add_up_to_the_flow(activation, norm, seed) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), norm(), activation(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 6, bias=False), activation(), nn.Linear(6, 3, bias=False),
    )  # fmt: skip
    mask = {name: torch.rand(live.shape) < 0.7 for name, live in dense_mask(model).items()}
    found = synflow(model, mask, Settings((2, 6, 6)), 1)
    for score in found.scores.values():
        assert score.min() >= 0
        assert score.sum().item() == pytest.approx(found.objective, rel=1e-9)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_scores_of_a_deep_net_are_finite_and_no_layer_is_without(norm) -> None:
    model = build("resnet20", (3, 32, 32), 10, norm=norm)
    scores = synflow(model, dense_mask(model), Settings((3, 32, 32)), 1).scores
    assert all(score.isfinite().all() and score.any() for score in scores.values())

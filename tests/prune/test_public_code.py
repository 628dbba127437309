"""Scores and masks of the public code of SynFlow's authors, for one small net, beside ours.

Their pruners (github.com/ganguli-lab/Synaptic-Flow, commit 9dfa57a, Pruners/pruners.py and prune.py; eval mode, global
masks, exponential schedule, a third of the weights kept; SynFlow in 100 steps, the others in one) were run in float64
on the net and images below; what came out stands here.
"""

import math

import pytest
import torch
from torch import nn

from foreseed.prune import PRUNERS, Settings, dense_mask, foresight

SCORES = {
    "snip": [
        0.0074017, 0.017663, 0.015901, 0.025521, 0.0023042, 0.019777, 0.028519, 0.0049619, 0.028024, 0.004028,
        0.024402, 0.0046564, 0.021796, 0.015207, 0.011026, 0.0013006, 0.029435, 0.006967, 0.054815, 0.0064209,
        0.0552, 0.0017854, 0.099585, 0.0076437, 0.072552, 0.029795, 0.026322, 0.029322, 0.037432, 0.011359,
        0.021352, 0.026461, 0.010678, 0.019823, 0.00079059, 0.026472, 0.0004131, 0.032487, 0.028095, 0.056556,
        0.021415, 0.054336,
    ],
    "grasp": [
        -0.0040863, -0.087344, -0.02044, 0.046939, -0.05138, 0.046155, 0.08079, 0.0094759, 0.095882, 0.033491,
        -0.11419, -0.050952, 0.33294, 0.024891, 0.28381, 0.18093, -0.15587, 0.18761, 0.032373, 0.01463, -0.034614,
        0.0034696, -0.060918, 0.0094628, 0.099232, 0.0068816, 0.0015596, 0.045046, 0.030879, -0.008011, 0.014349,
        -0.034964, -0.0060603, 0.016517, 0.00099259, -0.026609, 0.0027862, 0.047306, -0.015778, -0.013303, 0.055847,
        -0.019725,
    ],
    "synflow": [
        2.2129, 6.7957, 3.9623, 5.7789, 5.45, 4.3735, 6.5789, 2.6764, 7.2667, 0.84186, 7.795, 1.1692, 7.491, 3.1024,
        6.6959, 4.8251, 5.4487, 6.2282, 5.8013, 2.1812, 6.3678, 0.54041, 6.3946, 1.1138, 6.1066, 2.6884, 5.5083,
        4.154, 4.434, 5.3, 3.0213, 5.9849, 1.4786, 6.369, 0.16929, 6.4329, 1.8231, 5.9641, 3.3029, 5.012, 4.5959,
        3.8278,
    ],
}  # fmt: skip
"""Scores of all weights, to five digits; those of SNIP and GraSP were divided by (the size of) their sum."""

KEPT = {
    "snip": [6, 8, 16, 18, 20, 22, 24, 25, 27, 28, 37, 38, 39, 41],
    "grasp": [3, 5, 6, 8, 9, 12, 14, 15, 17, 18, 24, 27, 37, 40],
    "synflow": [1, 3, 4, 6, 8, 10, 18, 20, 22, 26, 29, 33, 35, 37],
    "magnitude": [1, 6, 8, 10, 12, 14, 18, 20, 22, 24, 31, 33, 35, 37],
}


def numbers(count: int, start: float, *shape: int) -> torch.Tensor:
    return torch.tensor([round(math.sin(1.7 * i + start), 3) for i in range(count)]).view(shape)


def net() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    model[0].weight.data, model[0].bias.data = numbers(18, 0.3, 2, 1, 3, 3), numbers(2, 0.5, 2)
    model[3].weight.data, model[3].bias.data = numbers(24, 1.1, 3, 8), numbers(3, 2.5, 3)
    return model


IMAGES, LABELS = numbers(64, 0.9, 4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
# Four images of one device, or of two: what devices find is added up.
DEVICES = [([IMAGES], [LABELS]), ([IMAGES[:3], IMAGES[3:]], [LABELS[:3], LABELS[3:]])]


@pytest.mark.parametrize(("images", "labels"), DEVICES)
@pytest.mark.parametrize("pruner", list(SCORES))
def test_scores_are_those_of_the_public_code(pruner, images, labels) -> None:
    settings = Settings((1, 4, 4), device_data=images, device_labels=labels)
    scores = PRUNERS[pruner].score(net(), dense_mask(net()), settings, 1).scores
    flat = torch.cat([score.flatten() for score in scores.values()])
    flat = flat if pruner == "synflow" else flat / flat.sum().abs()
    assert torch.allclose(flat, torch.tensor(SCORES[pruner], dtype=torch.double), rtol=1e-4, atol=0)


@pytest.mark.parametrize("pruner", list(KEPT))
def test_masks_are_those_of_the_public_code(pruner) -> None:
    options = {"input_shape": (1, 4, 4), "iterations": 100, "device_data": [IMAGES], "device_labels": [LABELS]}
    mask = foresight(net(), 1 / 3, pruner=pruner, **options).mask
    assert torch.cat([live.flatten() for live in mask.values()]).nonzero().flatten().tolist() == KEPT[pruner]

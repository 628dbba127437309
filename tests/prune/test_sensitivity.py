"""SNIP and GraSP: by hand where a hand suffices, by differences of the gradient's norm where not, and their costs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from foreseed.prune import PruneError, Settings, dense_mask, grasp, prunable, snip
from foreseed.prune.sensitivity import TEMPERATURE

SHAPE = (2, 5, 5)


def small_net() -> nn.Module:
    """Its logits are 3 and 3 for the image (1, 2), so that either class is as likely."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 1.0], [3.0, 0.0]])
    return model


def image_of(*labels: int) -> Settings:
    """The image (1, 2) once for each device, with its label there."""
    images = [torch.tensor([[1.0, 2.0]])] * len(labels)
    return Settings((2,), device_data=images, device_labels=[torch.tensor([label]) for label in labels])


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.Hardswish(), nn.Dropout(), nn.Flatten(), nn.Linear(18, 3))


def examples(*counts: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    images = [torch.randn(n, *SHAPE, generator=generator) for n in counts]
    return images, [torch.randint(0, 3, (n,), generator=generator) for n in counts]


def test_snip_by_hand() -> None:
    # dL/dz = softmax(z) - onehot = (-1/2, 1/2), dL/dW = (-1/2, 1/2) x (1, 2), times the weights.
    found = snip(small_net(), dense_mask(small_net()), image_of(0), 1)
    assert found.scores["weight"].tolist() == [[0.5, 1.0], [1.5, 0.0]]
    assert found.objective == pytest.approx(0.6931, abs=1e-4)


def test_snip_adds_devices_up_before_it_takes_the_size() -> None:
    scores = snip(small_net(), dense_mask(small_net()), image_of(0, 1), 1).scores["weight"]
    assert not scores.any(), "opposite gradients cancel"


def test_snip_sees_the_masked_network() -> None:
    mask = {"weight": torch.tensor([[True, True], [True, False]])}
    assert torch.equal(
        snip(small_net(), mask, image_of(0), 1).scores["weight"],
        snip(small_net(), dense_mask(small_net()), image_of(0), 1).scores["weight"],
    ), "a weight of 0 is as good as pruned"
    mask = {"weight": torch.tensor([[True, False], [True, False]])}  # logits 1 and 3
    p = torch.tensor([1.0, 3.0], dtype=torch.double).softmax(0)[1].item()
    assert snip(small_net(), mask, image_of(0), 1).scores["weight"].tolist() == [
        [pytest.approx(p), 0.0],
        [pytest.approx(3 * p), 0.0],
    ]


def test_grasp_by_hand() -> None:
    # With T the temperature and q = 1/2 the probability of the wrong class, |g|^2 = 2 q^2 |x|^2 / T^2, and
    # Hg, half of its derivative, is -+ 2 q^2 (1 - q) |x|^2 x / T^3 = -+ 1.25 x / T^3 for the two rows of weights.
    found = grasp(small_net(), dense_mask(small_net()), image_of(0), 1)
    scores = found.scores["weight"] * TEMPERATURE**3
    assert torch.allclose(scores, torch.tensor([[-1.25, -2.5], [3.75, 0.0]], dtype=torch.double))
    assert found.objective * TEMPERATURE**2 == pytest.approx(2.5)


def gradient_norm(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """|g|^2 with respect to the weights, without the biases."""
    loss = functional.cross_entropy(model(images) / TEMPERATURE, labels, reduction="sum")
    gradients = torch.autograd.grad(loss, [layer.weight for layer in prunable(model).values()])
    return sum(g.square().sum().item() for g in gradients)


def test_grasp_is_what_the_gradients_norm_loses_without_a_weight_to_first_order() -> None:
    images, labels = examples(4, 3)
    model = net().double().eval()
    scores = grasp(model, dense_mask(model), Settings(SHAPE, device_data=images, device_labels=labels), 1).scores
    every = torch.cat(images).double(), torch.cat(labels)
    for name in scores:
        for i in range(0, scores[name].numel(), 7):
            ends = []
            for share in (1 + 1e-4, 1 - 1e-4):
                changed = copy.deepcopy(model)
                prunable(changed)[name].weight.data.view(-1)[i] *= share
                ends.append(gradient_norm(changed, *every))
            # d|g|^2 / d(share) is 2 w (Hg), and taking a weight away changes its share by -1.
            assert scores[name].view(-1)[i].item() == pytest.approx((ends[0] - ends[1]) / 4e-4, rel=1e-5, abs=1e-12)
    assert min(score.min() for score in scores.values()) < 0 < max(score.max() for score in scores.values())


@pytest.mark.parametrize("scorer", [snip, grasp])
def test_scores_are_the_same_on_any_number_of_threads_and_however_images_are_held(scorer) -> None:
    images, labels = examples(50, 25)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            settings = Settings(SHAPE, device_data=images, device_labels=labels)
            results.append(scorer(net(), dense_mask(net()), settings, 1).scores["0.weight"])
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    together = Settings(SHAPE, device_data=[torch.cat(images)], device_labels=[torch.cat(labels)])
    assert torch.allclose(scorer(net(), dense_mask(net()), together, 1).scores["0.weight"], results[0], rtol=1e-9)


def test_costs_are_those_of_devices_that_backpropagate() -> None:
    images, labels = examples(6, 3)
    settings, mask = Settings(SHAPE, device_data=images, device_labels=labels), dense_mask(net())
    weights, forward = 2 * 2 * 9 + 18 * 3, 2 * (2 * 2 * 9 * 9 + 18 * 3)
    cost = snip(net(), mask, settings, 1).cost
    assert cost.device_flops == (6 * 3 * forward, 3 * 3 * forward)
    assert (cost.upload_bytes, cost.download_bytes, cost.server_flops) == (4 * weights, -(-weights // 8), 0)
    # GraSP's devices also receive the sum of all gradients, and send their part of the Hessian's product with it.
    cost = grasp(net(), mask, settings, 1).cost
    assert cost.device_flops == (6 * 12 * forward, 3 * 12 * forward)
    assert (cost.upload_bytes, cost.download_bytes) == (2 * 4 * weights, 4 * weights + -(-weights // 8))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "needs the labels of the images of 2 devices, and was given none; pass device_labels"),
        ([torch.zeros(3, dtype=torch.long)], "and was given those of 1 devices"),
        ([torch.zeros(3, dtype=torch.long)] * 2, r"labels of device 1: torch.int64 of shape \(3,\), .* its 2 images"),
        ([torch.zeros(3), torch.zeros(2)], r"labels of device 0: torch.float32"),
    ],
)
@pytest.mark.parametrize("scorer", [snip, grasp])
def test_labels_that_cannot_be_used_are_refused(scorer, labels, message) -> None:
    settings = Settings(SHAPE, device_data=examples(3, 2)[0], device_labels=labels)
    with pytest.raises(PruneError, match=f"{message}"):
        scorer(net(), dense_mask(net()), settings, 1)


@pytest.mark.parametrize("scorer", [snip, grasp])
def test_no_images_are_refused(scorer) -> None:
    with pytest.raises(PruneError, match=f"{scorer.__name__} was given no device's images"):
        scorer(net(), dense_mask(net()), Settings(SHAPE), 1)

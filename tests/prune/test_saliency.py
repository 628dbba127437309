"""NTK saliencies: the derivative that they claim to be, and nothing else touched."""

import copy

import pytest
import torch
from torch import nn

from foreseed.draws import Draws
from foreseed.prune import PruneError, Settings, dense_mask, ntk_ori, ntk_rand, prunable

SHAPE = (2, 5, 5)


def plain_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(18, 3))


def batch_norm_net() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Conv2d(2, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Hardswish(), nn.Dropout(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(18, 3))


def device_images(*counts: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(n, *SHAPE, generator=generator) for n in counts)


def normals(draws: Draws, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(draws.normals(*shape)).double()


def logits(model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The model's output with other weights, which replace its own."""
    for name, layer in prunable(model).items():
        layer.weight.data = weights[name]
    with torch.no_grad():
        return model(x)


def objective(model, mask, weights, moved, x) -> float:
    here = logits(model, {name: w * mask[name] for name, w in weights.items()}, x)
    there = logits(model, {name: w * mask[name] for name, w in moved.items()}, x)
    return (here - there).square().sum().item()


def difference_quotients(model, mask, weights, moved, x, h=1e-5) -> torch.Tensor:
    """dF/dm for every mask entry, by moving that entry alone up and down."""
    slopes = []
    for name in mask:
        for i in range(mask[name].numel()):
            ends = []
            for step in (h, -h):
                changed = {key: value.double() for key, value in mask.items()}
                changed[name].view(-1)[i] += step
                ends.append(objective(model, changed, weights, moved, x))
            slopes.append((ends[0] - ends[1]) / (2 * h))
    return torch.tensor(slopes, dtype=torch.double)


def with_statistics_of(model: nn.Module, weights, mask, x) -> nn.Module:
    """The model in eval mode, its BatchNorms holding the statistics of the masked network on x."""
    model = copy.deepcopy(model).eval()
    for norm in (module for module in model if isinstance(module, nn.BatchNorm2d)):
        inputs = torch.nn.functional.conv2d(x, weights["0.weight"] * mask["0.weight"])
        norm.running_mean = inputs.mean((0, 2, 3))
        norm.running_var = inputs.var((0, 2, 3))
    return model


@pytest.mark.parametrize("make", [plain_net, batch_norm_net])
@pytest.mark.parametrize("redraw", [False, True])
def test_saliency_is_the_size_of_the_summed_derivative_with_respect_to_the_mask(make, redraw) -> None:
    model = make().double()
    mask = dense_mask(model)
    mask["0.weight"].view(-1)[::3] = False
    settings = Settings(SHAPE, redraws=2, redraw_weights=redraw, epsilon=0.05, seed=9, device_data=device_images(6, 4))
    slopes = []
    for device, images in enumerate(settings.device_data):
        for draw in range(2):
            draws = Draws(9, "ntk-ori", 2, device, draw, 0)
            weights = {name: layer.weight.detach() for name, layer in prunable(model).items()}
            if redraw:
                weights = {name: normals(draws, w.shape) * (2 / w[0].numel()) ** 0.5 for name, w in weights.items()}
            moved = {name: w + 0.05 * normals(draws, w.shape) for name, w in weights.items()}
            settled = with_statistics_of(model, weights, mask, images.double())
            slopes.append(difference_quotients(settled, mask, weights, moved, images.double()))
    expected = torch.stack(slopes)
    got = ntk_ori(model, mask, settings, 2)
    scores, live = (torch.cat([one[name].flatten() for name in mask]) for one in (got.scores, mask))
    assert torch.allclose(scores[live], expected.sum(0).abs()[live], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(scores[live], expected.abs().sum(0)[live], rtol=0.1), "signs were lost before the sum"
    assert expected[:, ~live].any()
    assert not scores[~live].any(), "what is pruned stays so, and scores nothing"


def test_random_inputs_are_standard_normal_and_enter_as_if_a_device_held_them() -> None:
    model = plain_net().double()
    settings = Settings(SHAPE, redraws=1, batch=50, redraw_weights=False, seed=4)
    draws = Draws(4, "ntk-rand", 1, 0)
    x = normals(draws, (50, *SHAPE))
    weights = {name: layer.weight.detach() for name, layer in prunable(model).items()}
    moved = {name: w + 0.01 * normals(draws, w.shape) for name, w in weights.items()}
    got = ntk_rand(model, dense_mask(model), settings, 1)
    assert x.std().item() == pytest.approx(1.0, abs=0.05)
    assert got.objective == pytest.approx(objective(model, dense_mask(model), weights, moved, x), rel=1e-9)


def test_the_model_and_the_global_generator_are_left_as_they_were() -> None:
    model = batch_norm_net().train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(11)
    state = torch.get_rng_state()
    settings = Settings(SHAPE, batch=8, device_data=device_images(6))
    ntk_rand(model, dense_mask(model), settings, 1)
    ntk_ori(model, dense_mask(model), settings, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.training
    assert all(module.training for module in model)
    assert model[1].momentum == 0.1
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_global_generator_has_no_influence_and_the_seed_has() -> None:
    model = batch_norm_net()
    results = []
    for world, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(world)
        results.append(ntk_rand(model, dense_mask(model), Settings(SHAPE, batch=8, seed=seed), 1).scores["0.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_redrawn_scores_do_not_depend_on_the_weights_or_norms_of_the_model() -> None:
    model, other = batch_norm_net(), batch_norm_net()
    for p in (other[0].weight, other[1].weight, other[1].bias, other[5].weight):
        p.data.uniform_(1, 2)
    one, two = (ntk_rand(m, dense_mask(m), Settings(SHAPE, batch=8), 1) for m in (model, other))
    assert all(torch.equal(one.scores[name], two.scores[name]) for name in one.scores)
    fixed = Settings(SHAPE, batch=8, redraw_weights=False)
    one, two = (ntk_rand(m, dense_mask(m), fixed, 1) for m in (model, other))
    assert not torch.equal(one.scores["0.weight"], two.scores["0.weight"])


def test_scores_are_the_same_on_any_number_of_threads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1176, 10))
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(ntk_rand(model, dense_mask(model), Settings((3, 32, 32), redraws=1), 1).scores["0.weight"])
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_layer_that_is_never_used_scores_zero() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    scores = ntk_rand(Idle(), dense_mask(Idle()), Settings((4,), batch=8), 1).scores
    assert not scores["idle.weight"].any()
    assert scores["used.weight"].all()


def test_the_cost_of_a_device_counts_its_images_passes_and_upload() -> None:
    model = batch_norm_net()
    weights = 2 * 2 * 9 + 18 * 3
    forward = 2 * (2 * 2 * 9 * 9 + 18 * 3)
    cost = ntk_ori(model, dense_mask(model), Settings(SHAPE, redraws=2, device_data=device_images(6, 0, 3)), 1).cost
    # Two networks forward and backward are six forward passes, and BatchNorm's statistics take a seventh.
    assert cost.device_flops == (2 * 6 * 7 * forward, 0, 2 * 3 * 7 * forward)
    assert cost.upload_bytes == 4 * weights
    assert cost.download_bytes == -(-weights // 8)
    assert cost.server_flops == 0
    server = ntk_rand(plain_net(), dense_mask(plain_net()), Settings(SHAPE, redraws=2, batch=10), 1).cost
    assert server.server_flops == 2 * 10 * 6 * forward
    assert (server.device_flops, server.upload_bytes, server.download_bytes) == ((), 0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "was given no device's images"),
        ((torch.zeros(0, *SHAPE),), "was given no device's images"),
        ((torch.zeros(4, 2, 5, 6),), r"device 0: torch.float32 of shape \(4, 2, 5, 6\), expected normalised floats"),
        ((torch.zeros(4, *SHAPE), torch.zeros(4, *SHAPE, dtype=torch.uint8)), r"device 1: torch.uint8"),
    ],
)
def test_device_data_that_cannot_be_used_are_refused(data, message) -> None:
    with pytest.raises(PruneError, match=message):
        ntk_ori(plain_net(), dense_mask(plain_net()), Settings(SHAPE, device_data=data), 1)


@pytest.mark.parametrize("wrong", [{"redraws": 0}, {"batch": 0}, {"epsilon": 0.0}, {"epsilon": float("nan")}])
def test_settings_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(PruneError, match=f"{next(iter(wrong))} is .*, expected"):
        Settings(SHAPE, **wrong)


def test_an_input_shape_that_the_model_cannot_take_is_refused() -> None:
    with pytest.raises(PruneError, match=r"does not take inputs of shape \(3, 5, 5\)"):
        ntk_rand(plain_net(), dense_mask(plain_net()), Settings((3, 5, 5)), 1)

"""Foresight pruning as a whole: exact densities, reproducible masks, and the shape that the paper reports."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed.engine.errors import ForeseedError
from foreseed.models import build
from foreseed.prune import PRUNERS, Cost, Mask, PruneError, Settings, Step, dense_mask, foresight, ntk_rand, prunable
from foreseed.prune.pruning import kept

SHAPE = (3, 8, 8)
CIFAR = (3, 32, 32)


DRAWN = ("ntk-rand", "ntk-ori", "erk", "random")
"""Pruners that draw random numbers; the others look at the model's own weights alone."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 10)
    )


N = 4 * 27 + 144 * 8 + 80


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, *SHAPE, generator=generator) for n in (7, 3)]


def labels() -> list[torch.Tensor]:
    return [torch.arange(n) % 10 for n in (7, 3)]


def count(mask: Mask) -> int:
    return sum(int(live.sum()) for live in mask.values())


def same(one: Mask, two: Mask) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def mac_ratio(model: nn.Module, mask: Mask) -> float:
    """MACs of live weights over MACs of all, counted from the sizes of what the layers put out."""
    places: dict[str, int] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: places.update({name: out[0, 0].numel()}))
        for name, layer in prunable(model).items()
    ]
    with torch.no_grad():
        copy.deepcopy(model).eval()(torch.zeros(1, *CIFAR))
    for hook in hooks:
        hook.remove()
    live = sum(int(mask[name].sum()) * places[name] for name in mask)
    return live / sum(mask[name].numel() * places[name] for name in mask)


@pytest.mark.parametrize("pruner", list(PRUNERS))
@settings(max_examples=12, deadline=None)
@given(density=st.floats(0.01, 0.999), iterations=st.integers(1, 4), seed=st.integers(0, 2**63))
def test_every_pruner_keeps_exactly_the_density_asked_for_and_no_layer_dies(pruner, density, iterations, seed) -> None:
    result = foresight(
        net(), density, pruner=pruner, input_shape=SHAPE, iterations=iterations, redraws=1, batch=4, seed=seed,
        device_data=data(), device_labels=labels(),
    )  # fmt: skip
    assert count(result.mask) == round(density * N)
    assert all(live.any() for live in result.mask.values())
    assert result.densities == {name: int(live.sum()) / live.numel() for name, live in result.mask.items()}


@pytest.mark.parametrize("pruner", list(PRUNERS))
def test_a_seed_gives_one_mask_and_the_world_outside_is_left_alone(pruner) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    runs = []
    for world, seed in ((1, 3), (2, 3), (1, 4)):
        torch.manual_seed(world)
        state = torch.get_rng_state()
        options = {"input_shape": SHAPE, "iterations": 3, "redraws": 2, "batch": 6, "seed": seed}
        runs.append(foresight(model, 0.2, pruner=pruner, device_data=data(), device_labels=labels(), **options).mask)
        assert torch.equal(torch.get_rng_state(), state)
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2]) == (pruner not in DRAWN)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_density_falls_by_the_same_factor_each_iteration() -> None:
    steps: list[Step] = []
    result = foresight(net(), 0.1, input_shape=SHAPE, iterations=4, redraws=1, batch=4, progress=steps.append)
    assert tuple(steps) == result.history
    assert [step.iteration for step in steps] == [1, 2, 3, 4]
    assert [step.kept for step in steps] == [round(0.1 ** (t / 4) * N) for t in (1, 2, 3, 4)]
    assert all(step.iterations == 4 and step.density == step.kept / N and step.objective > 0 for step in steps)
    assert kept(1000, 0.25, 1, 2) == 500


def test_density_one_returns_all_ones_without_work() -> None:
    class Untouchable(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the model was run")

    model = Untouchable(4, 3)
    result = foresight(model, 1.0, input_shape=(4,))
    assert same(result.mask, dense_mask(model))
    assert (result.cost, result.history, result.densities) == (Cost(), (), {"weight": 1.0})


def test_random_is_uniform_over_all_weights_and_magnitude_keeps_the_largest() -> None:
    model = build("lenet5", CIFAR, 10, activation="relu")
    chance = foresight(model, 0.2, pruner="random", input_shape=CIFAR)
    # Four standard deviations of the smallest layer's share.
    assert all(share == pytest.approx(0.2, abs=0.08) for share in chance.densities.values())
    largest = foresight(model, 0.2, pruner="magnitude", input_shape=CIFAR)
    sizes = {name: layer.weight.detach().abs() for name, layer in prunable(model).items()}
    smallest_kept = min(sizes[name][live].min() for name, live in largest.mask.items() if live.sum() > 1)
    assert smallest_kept >= max(sizes[name][~live].max() for name, live in largest.mask.items())
    assert len(chance.history) == len(largest.history) == 1
    assert chance.cost == largest.cost == Cost()


def test_ntk_ori_charges_every_device_32_bits_a_weight_and_iteration() -> None:
    model = net()
    cost = foresight(model, 0.3, pruner="ntk-ori", input_shape=SHAPE, iterations=3, redraws=2, device_data=data()).cost
    assert cost.upload_bytes == 3 * 4 * N
    assert cost.download_bytes == 4 * sum(p.numel() for p in model.parameters()) + 3 * ((N + 7) // 8)
    assert cost.device_flops[0] / cost.device_flops[1] == 7 / 3
    free = foresight(model, 0.3, input_shape=SHAPE, iterations=3, redraws=2, batch=4).cost
    assert free.upload_bytes == free.download_bytes == 0
    assert free.server_flops > 0


@pytest.mark.parametrize(("pruner", "gradients"), [("snip", 1), ("grasp", 2)])
def test_snip_and_grasp_ask_devices_once_and_charge_them_for_it(pruner, gradients) -> None:
    options = {"input_shape": SHAPE, "iterations": 3, "device_data": data(), "device_labels": labels()}
    result = foresight(net(), 0.3, pruner=pruner, **options)
    assert len(result.history) == 1
    assert result.cost.upload_bytes == gradients * 4 * N
    model = 4 * sum(p.numel() for p in net().parameters())
    assert result.cost.download_bytes == model + (gradients - 1) * 4 * N + (N + 7) // 8
    assert result.cost.device_flops[0] / result.cost.device_flops[1] == 7 / 3


def test_synflow_takes_all_its_steps_and_asks_nobody() -> None:
    result = foresight(net(), 0.1, pruner="synflow", input_shape=SHAPE, iterations=7)
    assert len(result.history) == 7
    assert (result.cost.device_flops, result.cost.upload_bytes, result.cost.download_bytes) == ((), 0, 0)


def test_erk_keeps_the_same_share_of_a_layer_whatever_is_drawn() -> None:
    one, two = (foresight(net(), 0.1, pruner="erk", input_shape=SHAPE, seed=seed) for seed in (0, 1))
    assert one.densities == two.densities
    # Live weights go as 144 + 8, 4 + 3 + 3 + 3 and 8 + 10, which add up to 183.
    expected = {"0.weight": 134 * 13 / 183 / 108, "4.weight": 134 * 152 / 183 / 1152, "6.weight": 134 * 18 / 183 / 80}
    assert one.densities == pytest.approx(expected, abs=1 / 80)


WEIGHABLE = [name for name, pruner in PRUNERS.items() if pruner.weighable]


def masks_by_power(pruner: str, *powers: float) -> list[Mask]:
    options = {"input_shape": SHAPE, "iterations": 3, "redraws": 1, "batch": 6, "seed": 3}
    options |= {"device_data": data(), "device_labels": labels()}
    return [foresight(net(), 0.2, pruner=pruner, cost_power=power, **options).mask for power in powers]


def test_magnitude_by_cost_is_what_a_hand_would_choose() -> None:
    model = net()
    places = {"0.weight": 36, "4.weight": 1, "6.weight": 1}
    scores = torch.cat([layer.weight.detach().abs().flatten() / places[n] for n, layer in prunable(model).items()])
    [mask] = masks_by_power("magnitude", 1.0)
    kept = torch.cat([live.flatten() for live in mask.values()])
    conv = scores[: 4 * 27]
    assert mask["0.weight"].sum() == max(1, int((conv >= scores[kept].sort().values[1]).sum()))
    assert scores[kept][mask["0.weight"].sum() :].min() >= scores[~kept][conv.numel() :].max()


@pytest.mark.parametrize("pruner", WEIGHABLE)
def test_the_higher_the_power_of_cost_the_fewer_weights_of_convolutions(pruner) -> None:
    none, some, much = masks_by_power(pruner, 0.0, 0.1, 10.0)
    convs = [int(mask["0.weight"].sum()) for mask in (none, some, much)]
    assert convs[0] > convs[1] > convs[2] == 1
    assert count(none) == count(some) == count(much)


@settings(max_examples=12, deadline=None)
@given(power=st.floats(0, 5), density=st.floats(0.01, 0.999))
def test_a_mask_by_cost_has_exactly_its_density_and_no_empty_layer(power, density) -> None:
    mask = foresight(net(), density, pruner="synflow", input_shape=SHAPE, iterations=2, cost_power=power).mask
    assert count(mask) == round(density * N)
    assert all(live.any() for live in mask.values())


@pytest.mark.parametrize("pruner", [name for name in PRUNERS if name not in WEIGHABLE])
def test_cost_without_scores_to_divide_is_refused(pruner) -> None:
    with pytest.raises(PruneError, match=f"{pruner} has no scores that could be divided by a cost, .* ntk-rand, "):
        masks_by_power(pruner, 0.5)


@pytest.mark.parametrize("power", [-0.1, float("nan"), float("inf")])
def test_a_power_of_cost_that_is_none_is_refused(power) -> None:
    with pytest.raises(PruneError, match=r"cost_power is .*, expected 0 or a positive number"):
        masks_by_power("magnitude", power)


def test_ntk_rand_never_looks_at_device_data() -> None:
    options = {"input_shape": SHAPE, "iterations": 2, "redraws": 1, "batch": 4}
    assert same(foresight(net(), 0.3, **options).mask, foresight(net(), 0.3, device_data=data(), **options).mask)


def test_dead_units_score_zero_in_one_draw_and_yet_nothing_collapses() -> None:
    model = build("lenet5", CIFAR, 10, activation="relu")
    mask = dense_mask(model)
    scores = ntk_rand(model, mask, Settings(CIFAR, redraws=1), 1).scores
    zeros = sum(int((score == 0).sum()) for score in scores.values()) / count(mask)
    assert zeros > 0.1, "the trap is not there, so this test shows nothing"
    result = foresight(model, 0.05, input_shape=CIFAR, iterations=50, redraws=1, batch=20)
    assert count(result.mask) == round(0.05 * count(mask))
    assert all(live.any() for live in result.mask.values())


# What a pruner does to an architecture is a claim about all seeds: several are tried, and their mean must lie on the
# claimed side by three of its standard errors.


def clear_of(samples: list[float], bound: float) -> float:
    """How many standard errors the samples' mean lies above a bound."""
    return (np.mean(samples) - bound) / (np.std(samples, ddof=1) / np.sqrt(len(samples)))


@pytest.mark.slow
def test_lenet5_at_a_tenth_keeps_its_convs_and_thins_its_linear_layers() -> None:
    seeds = range(4)
    results = [
        foresight(
            build("lenet5", CIFAR, 10, activation="relu", seed=seed), 0.1,
            input_shape=CIFAR, iterations=20, batch=20, seed=seed,
        )
        for seed in seeds
    ]  # fmt: skip
    names = ["conv1", "conv2", "fc1", "fc2", "fc3"]
    shares = {name: [r.densities[f"{name}.weight"] for r in results] for name in names}
    assert clear_of(shares["conv1"], 0.5) > 3
    assert clear_of(shares["conv2"], 0.5) > 3
    assert clear_of(shares["fc3"], 0.2) > 3
    assert clear_of(shares["fc1"], 0.1) < -3
    assert clear_of(shares["fc2"], 0.1) < -3


# The two models of the paper's pruning table, at 80 % sparsity; it reports 0.72 and 0.43 of the FLOPs. A batch of 10
# instead of 100 and fewer iterations than its T_p (50, 20) take a hundredth of the time.


def mac_ratios(name: str, classes: int, iterations: int, **options: str) -> list[float]:
    ratios = []
    for seed in range(3):
        model = build(name, CIFAR, classes, seed=seed, **options)
        result = foresight(model, 0.2, input_shape=CIFAR, iterations=iterations, redraws=2, batch=10, seed=seed)
        ratios.append(mac_ratio(model, result.mask))
    return ratios


@pytest.mark.slow
def test_lenet5_wide_at_a_fifth_keeps_most_of_its_flops() -> None:
    ratios = mac_ratios("lenet5-wide", 10, 10, activation="relu")
    assert clear_of(ratios, 0.5) > 3
    assert max(ratios) < 0.727, "more than with all convolutions kept"


@pytest.mark.slow
def test_resnet20_at_a_fifth_keeps_less_than_half_of_its_flops_and_more_than_its_share() -> None:
    ratios = mac_ratios("resnet20", 100, 5, norm="batch", activation="relu")
    assert clear_of(ratios, 0.5) < -3
    assert clear_of(ratios, 0.2) > 3


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_that_is_no_share_is_refused(density) -> None:
    with pytest.raises(PruneError, match="expected a share above 0 and at most 1"):
        foresight(net(), density, input_shape=SHAPE)


def test_a_density_that_would_empty_a_layer_is_refused_with_the_smallest_that_does() -> None:
    with pytest.raises(PruneError, match=r"keeps 1 of 1340 weights, but each of the 3 layers"):
        foresight(net(), 0.001, input_shape=SHAPE)


def test_an_unknown_pruner_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(PruneError, match=r"unknown pruner 'ntk_rnd', .* did you mean 'ntk-rand'\?"):
        foresight(net(), 0.1, pruner="ntk_rnd", input_shape=SHAPE)
    assert issubclass(PruneError, ForeseedError)


def test_other_requests_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(PruneError, match="iterations is 0"):
        foresight(net(), 0.1, input_shape=SHAPE, iterations=0)
    with pytest.raises(PruneError, match="no Conv2d or Linear"):
        foresight(nn.ReLU(), 0.1, input_shape=SHAPE)
    with pytest.raises(PruneError, match="pass device_data"):
        foresight(net(), 0.1, pruner="ntk-ori", input_shape=SHAPE)

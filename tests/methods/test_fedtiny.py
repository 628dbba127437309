"""FedTiny: which mask is selected, which weights grow and drop, its sparsity over a run, and what it costs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from foreseed import models
from foreseed.config import ConfigError, load
from foreseed.coordinator.sampling import sample
from foreseed.engine import Engine, Samples
from foreseed.meter import Work, bp_memory, device
from foreseed.methods import RoundResult, fedtiny
from foreseed.methods.backprop import LocalTrainer
from foreseed.methods.fedavg import aggregate
from foreseed.methods.moving_mask import Layout
from foreseed.methods.task import records
from foreseed.simulate import prepare
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, small_config, write_bars

FEW = {"method": "fedtiny", "fedtiny__every": 2, "fedtiny__until": 5, "fedtiny__share": 0.9}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


def rounds(world: World, count: int) -> tuple[fedtiny.State, list[RoundResult]]:
    state = fedtiny.init(world.task)
    with world.devices() as devices:
        return state, [fedtiny.round(world.task, devices, state) for _ in range(count)]


def two_layers() -> Layout:
    """Of 12 and 6 weights."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    return Layout(models.compile(net, None, input_shape=(1, 2, 2), mean=(0.0,), std=(1.0,))[0])


# --- beside the public code ---


def test_weights_drop_and_grow_as_in_the_public_code() -> None:
    """Came out of `sparse_update_step` of FedPruning/FedPruning, api/pruning/init_scheme.py (round 10 of 100, 0.5)."""
    weights = np.array([0.5, -0.1, 0.3, -0.7, 0.05, 0.9, -0.2, 0.4, 0, 0, 0, 0, 0.6, -0.3, 0, 0, 0.2, -0.8], np.float32)
    gradient = np.zeros(18, np.float32)
    gradient[8:12], gradient[14:16] = [0.3, -0.9, 0.1, 0.6], [-0.2, 0.5]
    layout, live = two_layers(), weights != 0
    moving = fedtiny.quotas(fedtiny.Settings(share=0.5, blocks=1), layout, live, 10)
    assert [count for _, count in moving] == [3, 1]
    after = fedtiny.readjusted(live, weights, gradient, moving)
    assert after.astype(int).tolist() == [1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1]


def test_fewer_and_fewer_weights_move_as_in_the_public_code() -> None:
    """Came out of `f_decay` of the same file, of 8 and 4 live weights; caps are the weights that are pruned."""
    layout, live = two_layers(), np.array([1] * 8 + [0] * 4 + [1] * 4 + [0] * 2, bool)
    settings = fedtiny.Settings(share=0.5, blocks=1)
    found = {t: [count for _, count in fedtiny.quotas(settings, layout, live, t)] for t in (10, 50, 90, 100)}
    assert found == {10: [3, 1], 50: [2, 1], 90: [], 100: []}
    live[10:12] = True
    assert [count for _, count in fedtiny.quotas(settings, layout, live, 10)] == [2, 1]


def test_gradients_and_statistics_are_averaged_and_a_mask_is_selected_as_in_the_public_code() -> None:
    """Came out of `aggregate_gradient`, `aggregate_BN_params` and `aggregate_BN_loss` of its FedTinyAggregator."""
    reports = [(30, np.array([0, 0.8, 0, -0.4], np.float32)), (10, np.array([0, 0, -2, 0.4], np.float32))]
    assert aggregate(reports).tolist() == pytest.approx([0, 0.6, -0.5, -0.2])
    stats = [(30, np.array([1, 2, 0, 4], np.float32)), (10, np.array([5, -2, 8, 0], np.float32))]
    assert aggregate(stats).tolist() == [2, 1, 2, 3]
    assert fedtiny.lowest([[2.1, 1.9, 2.3], [1.8, 2.2, 1.7]]) == 0  # means 1.95, 2.05 and 2.0
    assert fedtiny.lowest([[2.0, 1.0], [1.0, 2.0]]) == 0


# --- progressive pruning ---


def test_a_device_reports_the_largest_gradients_of_pruned_weights_alone() -> None:
    layout, live = two_layers(), np.array([1, 0] * 6 + [1, 1, 1, 0, 0, 0], bool)
    gradient = np.array([9, 1, 9, -5, 9, 2, 9, -3, 9, 4, 9, 0, 9, 9, 9, -1, 2, -3], np.float32)
    report = fedtiny.top_gradients(gradient, live, [(layout.layers[0], 2), (layout.layers[1], 1)])
    assert report.tolist() == [0, 0, 0, -5, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, -3]


def test_blocks_take_turns_from_the_last_to_the_first() -> None:
    layout = Layout(models.compile(models.build("lenet5", (3, 32, 32), 10), None, input_shape=(3, 32, 32),
                                   mean=(0.5,) * 3, std=(0.2,) * 3)[0])  # fmt: skip
    live = layout.everything.copy()
    for layer in layout.layers:
        live[layer.at.start : layer.at.start + layer.size // 2] = False

    def turns(blocks: int) -> list[list[str]]:
        settings = fedtiny.Settings(blocks=blocks, every=2, until=20)
        moves = [fedtiny.quotas(settings, layout, live, number) for number in range(1, 13)]
        assert all(not moving for moving in moves[::2])
        return [[layer.name for layer, _ in moving] for moving in moves[1::2]]

    assert turns(5) == [["fc3"], ["fc2"], ["fc1"], ["conv2"], ["conv1"], ["fc3"]]
    assert turns(2)[:3] == [["fc2", "fc3"], ["conv1", "conv2", "fc1"], ["fc2", "fc3"]]
    assert turns(1)[0] == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert turns(99) == turns(5)


# --- selection ---


def test_candidates_have_one_density_and_share_it_out_differently(bars: Path) -> None:
    world = make_world(small_config(bars, **FEW, fedtiny__candidates=6))
    layout = Layout(world.task.program)
    masks = fedtiny.candidate_masks(world.task, layout)
    counts = [[int(live[layer.at].sum()) for layer in layout.layers] for live in masks]
    assert len(masks) == 6
    assert {sum(some) for some in counts} == {round(0.3 * layout.n_weights)}
    assert len({tuple(some) for some in counts}) == 6
    for live in masks:
        for layer in layout.layers:
            weights = np.abs(world.task.values[layer.at])
            assert weights[live[layer.at]].min() >= weights[~live[layer.at]].max(initial=0)
    again = fedtiny.candidate_masks(world.changed(seed=world.config.seed + 1).task, layout)
    assert (masks[0] == again[0]).all()
    assert (masks[2] != again[2]).any()


@pytest.mark.parametrize(("model", "seed"), [("tests.simulate.small:tiny", 0), (WITH_BATCH_NORM, 1)])
def test_the_candidate_of_the_lowest_loss_wins(model: str, seed: int, bars: Path) -> None:
    world = make_world(small_config(bars, **FEW, model__name=model, seed=seed, fedtiny__candidates=4))
    task, layout, chosen = world.task, Layout(world.task.program), sample(world.config.seed, 1, range(6), 3)
    pairs = [world.population.images(device) for device in chosen]
    shards = [Samples.records(records(*pair), task.program.image_bytes) for pair in pairs]
    losses, stats = [], []
    for live in fedtiny.candidate_masks(task, layout):
        engine, values = Engine(layout.pruned(live), batch=8), task.values[live]
        if task.program.n_stats:
            stats.append(aggregate((shard.count, np.array(engine.batch_stats(values, shard))) for shard in shards))
        losses.append(sum(engine.loss(values, shard, stats[-1] if stats else None)[0] for shard in shards))
    best = int(np.argmin(losses))
    state = fedtiny.init(task)
    with world.devices() as devices:
        work, traffic = fedtiny.select(task, devices, layout, chosen, state)
    masks = fedtiny.candidate_masks(task, layout)
    assert (state.live == masks[best]).all()
    assert best != 0, "the case should tell the winner from where a run starts"
    assert state.stats.tolist() == (stats[best].tolist() if stats else [])
    images, passes = sum(shard.count for shard in shards), 2 if stats else 1
    assert work.flops == sum(2 * passes * images * layout.macs(live) for live in masks)
    values = sum(4 * (int(live.sum()) + task.program.n_stats) + layout.mask_bytes for live in masks)
    assert traffic[:2] == (3 * 4 * 4 * (task.program.n_stats + 1), 3 * values)


# --- rounds ---


def test_a_round_that_moves_the_mask_is_written_by_hand(bars: Path) -> None:
    world = make_world(small_config(bars, **FEW, fedtiny__blocks=1))
    task, t, layout = world.task, world.config.train, Layout(world.task.program)
    state, _ = rounds(world, 1)
    live, weights, results = state.live.copy(), state.weights.copy(), []
    chosen, trainer = sample(world.config.seed, 2, range(6), 3), LocalTrainer(task.model, task.program)
    moving = fedtiny.quotas(world.config.own(fedtiny.Settings), layout, live, 2)
    for number in chosen:
        images, labels = world.population.images(number)
        seed = (world.config.seed, 2, number)
        trained = trainer.train(
            weights, images, labels, epochs=t.epochs, batch=t.batch, lr=t.lr * t.lr_decay, momentum=t.momentum,
            weight_decay=t.weight_decay, seed=seed, live=live,
        )  # fmt: skip
        rows = fedtiny.Draws(*seed, "growth").permutation(len(images))[: t.batch]
        [gradient], _ = trainer.gradient(trained.values, images[rows], labels[rows], [(0, len(rows))])
        results.append((len(images), trained.values, fedtiny.top_gradients(gradient, live, moving)))
    with world.devices() as devices:
        row = fedtiny.round(task, devices, state)
    mean, gradient = aggregate((n, v) for n, v, _ in results), aggregate((n, g) for n, _, g in results)
    after = fedtiny.readjusted(live, mean, gradient, moving)
    assert (state.live == after).all()
    assert (after & ~live).sum() == sum(count for _, count in moving) > 20
    np.testing.assert_array_equal(state.weights, np.where(after & live, mean, 0))
    # The mask of before to whoever had it not yet, values both ways, and an index and a value for each report.
    new = len(set(chosen) - set(sample(world.config.seed, 1, range(6), 3)))
    pairs = sum(count for _, count in moving)
    assert row.traffic.bytes_up == 3 * (4 * int(live.sum()) + 8 * pairs)
    assert row.traffic.bytes_down == 3 * 4 * int(live.sum()) + new * layout.mask_bytes
    batches = sum(min(t.batch, n) for n, _, _ in results)
    dense = sum(layer.macs_per_weight * layer.size for layer, _ in moving)
    trained_work = 6 * row.samples * layout.macs(live)
    assert row.work.flops == trained_work + 2 * batches * (2 * layout.macs(live) + dense)
    assert row.work.forward_passes == 3 * (row.samples + batches)


def test_a_run_keeps_its_sparsity_and_its_mask_comes_to_rest(bars: Path) -> None:
    world = make_world(small_config(bars, **FEW | {"fedtiny__until": 6}, rounds=9, model__name=WITH_BATCH_NORM))
    layout, state = Layout(world.task.program), fedtiny.init(world.task)
    masks = []
    with world.devices() as devices:
        for _ in range(9):
            fedtiny.round(world.task, devices, state)
            masks.append(state.live.copy())
            assert layout.density(state.live) == pytest.approx(0.3, abs=0.5 / layout.n_weights)
            assert (state.weights[~state.live] == 0).all()
            assert len(state.values) == state.program.n_live
    moved = [bool((a != b).any()) for a, b in pairwise(masks)]
    assert moved == [True, False, True, False, False, False, False, False]  # after rounds 2 and 4; at 6 nothing is left


def test_a_round_without_moves_is_plain_training(bars: Path) -> None:
    world = make_world(small_config(bars, **FEW))
    layout = Layout(world.task.program)
    state, [_, _, third] = rounds(world, 3)
    assert third.work == layout.work(state.live, 3 * third.samples)
    assert fedtiny.growth_work(layout, state.live, [], 8) == Work()


def test_a_device_holds_the_reports_of_its_largest_block(bars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "process_peak_bytes", lambda *_: None)
    world = make_world(small_config(bars, **FEW | {"fedtiny__until": 4}, rounds=4, fedtiny__blocks=2))
    task, layout, state = world.task, Layout(world.task.program), fedtiny.init(world.task)
    # Of three layers the last moves in round 2, with half of 0.9 of its live weights; in round 4 nothing is left.
    pairs = int(0.45 * int(state.live[layout.layers[-1].at].sum()))
    planned = fedtiny.device_memory(task, state).planned_bytes
    assert planned == bp_memory(task.program, 8, True).planned_bytes + 8 * pairs


# --- bad input, learning ---


@pytest.mark.parametrize("change", [{"fedtiny__every": 6}, {"fedtiny__until": 6}, {"fedtiny__until": 1}])
def test_moves_that_do_not_fit_the_run_are_refused_before_it(change: dict[str, Any], bars: Path) -> None:
    world = make_world(small_config(bars, **FEW))
    with pytest.raises(ConfigError, match=r"rounds = 5: the mask has to move, and to come to rest.*lower fedtiny"):
        fedtiny.init(world.changed(**change).task)


def test_a_density_that_empties_a_layer_is_refused_before_the_first_round(bars: Path) -> None:
    world = make_world(small_config(bars, **FEW))
    with pytest.raises(ConfigError, match=r"leave none for .*raise prune.density"):
        fedtiny.init(world.changed(prune__density=0.01).task)


def test_digits_are_learnt() -> None:
    few = ["data.devices=10", "data.per_round=5", "data.beta=10.0", "fedtiny.until=12"]
    world = World(*prepare(load("fedtiny", few)))
    state = fedtiny.init(world.task)
    with world.devices() as devices:
        for _ in range(14):
            fedtiny.round(world.task, devices, state)
        accuracy, _ = devices.evaluate(state.program, state.values, state.stats)
    assert accuracy > 0.8

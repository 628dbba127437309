"""ZeroFL: what is sent in its three modes, a round written by hand, its sparsity over a run, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed import models
from foreseed.config import ConfigError, load
from foreseed.coordinator.sampling import sample
from foreseed.meter import bp_memory, device
from foreseed.methods import RoundResult, fedavg, zerofl
from foreseed.methods.backprop import LocalTrainer
from foreseed.methods.moving_mask import Layout, layers_kept
from foreseed.methods.swat import SparseTraining
from foreseed.methods.zerofl import sent_counts, upload, wire_bytes
from foreseed.simulate import prepare
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, small_config, write_bars

MODES: Sequence[zerofl.Uplink] = get_args(zerofl.Uplink)


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


def rounds(world: World, count: int, **changes: Any) -> tuple[zerofl.State, list[RoundResult]]:
    world = world.changed(**changes)
    state = zerofl.init(world.task)
    with world.devices() as devices:
        return state, [zerofl.round(world.task, devices, state) for _ in range(count)]


# --- what is sent ---


def test_three_ways_to_choose_what_is_sent() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    program, _ = models.compile(net, None, input_shape=(1, 2, 2), mean=(0.0,), std=(1.0,))
    layout = Layout(program)  # eight weights, then two biases, which are always sent
    before = np.array([4, -3, 2, 1, 0, 0, 5, 0.5, 1, 1], np.float32)
    after = np.array([4, -5, 2, 1, 3, -1, 1, 0.5, 2, 0], np.float32)
    sent = {mode: upload(mode, layout, before, after, [3]).tolist() for mode in MODES}
    assert sent["top-k-weights"] == [4, -5, 0, 0, 3, 0, 0, 0, 2, 0]
    assert sent["diff-on-top-k"] == [0, -2, 0, 0, 3, 0, 0, 0, 1, -1]
    assert sent["top-k-of-diff"] == [0, -2, 0, 0, 3, 0, -4, 0, 1, -1]


def test_the_mask_ratio_is_a_share_of_all_weights() -> None:
    layout = Layout(models.compile(nn.Sequential(nn.Flatten(), nn.Linear(25, 4)), None, input_shape=(1, 5, 5),
                                   mean=(0.0,), std=(1.0,))[0])  # fmt: skip
    assert [sent_counts(layout, [10], ratio) for ratio in (0.0, 0.1, 0.2, 1.0)] == [[10], [20], [30], [100]]
    # Four biases, and weights with a bit for each of the hundred; all of them are sent without.
    assert [wire_bytes(layout, n) for n in (10, 30, 96, 97, 100)] == [69, 149, 413, 416, 416]


# --- a round ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["tests.simulate.small:tiny", WITH_BATCH_NORM])
def test_two_rounds_are_algorithm_1(mode: zerofl.Uplink, model: str, bars: Path) -> None:
    world = make_world(
        small_config(bars, method="zerofl", model__name=model, zerofl__uplink=mode, zerofl__dense="none")
    )
    state, rows = rounds(world, 2)
    layout, trainer = Layout(world.task.program), LocalTrainer(world.task.model, world.task.program)
    kept = {layer.name: int(state.live[layer.at].sum()) for layer in layout.layers}
    more = [kept[layer.name] + round(0.2 * layer.size) for layer in layout.layers]
    weights, stats, t = world.task.values.astype(np.float64), world.task.stats, world.config.train
    for number in (1, 2):
        chosen, sums, means, total = sample(world.config.seed, number, range(6), 3), 0.0, 0.0, 0
        for one in chosen:
            images, labels = world.population.images(one)
            with SparseTraining(trainer.model, kept):
                trained = trainer.train(
                    weights.astype(np.float32), images, labels, epochs=t.epochs, batch=t.batch,
                    lr=t.lr * t.lr_decay ** (number - 1), momentum=t.momentum, weight_decay=t.weight_decay,
                    seed=(world.config.seed, number, one), stats=stats,
                )  # fmt: skip
            change = trained.values - weights.astype(np.float32)
            mask = layers_kept(layout, np.abs(change if mode == "top-k-of-diff" else trained.values), more)
            sums += len(images) * np.where(mask, trained.values if mode == "top-k-weights" else change, 0)
            means += len(images) * trained.stats.astype(np.float64)
            total += len(images)
        # What was not sent counts as 0: the sum is divided by all images, not by those of who sent it.
        weights = sums / total + (0 if mode == "top-k-weights" else weights)
        stats = (means / total).astype(np.float32)
    np.testing.assert_allclose(state.weights, weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state.stats, stats, rtol=1e-4, atol=1e-6)
    # The model is the largest weights of each layer, of dense ones.
    assert (state.live == layers_kept(layout, np.abs(state.weights), list(kept.values()))).all()
    assert (state.values == state.weights[state.live]).all()
    assert np.count_nonzero(state.weights) > 1.2 * state.program.n_live
    assert rows[1].samples == total


def test_all_sent_at_full_density_is_fedavg(bars: Path) -> None:
    world = make_world(small_config(bars, method="zerofl", prune__density=1.0))
    state, _ = rounds(world, 2)
    averaged = make_world(small_config(bars, method="fedavg"))
    other = fedavg.init(averaged.task)
    with averaged.devices() as devices:
        for _ in range(2):
            fedavg.round(averaged.task, devices, other)
    assert (state.values == other.values).all()


# --- sparsity ---


@given(st.floats(0.02, 1), st.sampled_from(["none", "last", "both"]))
@settings(max_examples=20, deadline=None)
def test_the_density_is_as_set_to_the_weight_whatever_is_left_whole(density: float, ends: str) -> None:
    model = models.build("lenet5", (3, 32, 32), 10)
    program, values = models.compile(model, None, input_shape=(3, 32, 32), mean=(0.5,) * 3, std=(0.2,) * 3)
    config = load(None, [f"prune.density={density}", f"zerofl.dense={ends}", "method=zerofl"])
    task: Any = type("Task", (), {"config": config, "program": program, "values": np.array(values), "stats": None})
    layout = Layout(program)
    whole = {"none": 0, "last": 840, "both": 840 + 450}[ends]
    if round(density * layout.n_weights) < whole + 30:
        return
    live = zerofl.init(task).live
    counts = [int(live[layer.at].sum()) for layer in layout.layers]
    assert sum(counts) == round(density * layout.n_weights)
    assert (counts[-1] == 840) >= (ends != "none")
    assert (counts[0] == 450) >= (ends == "both")


def test_a_run_keeps_its_sparsity(bars: Path) -> None:
    world = make_world(small_config(bars, method="zerofl", prune__density=0.2, train__lr=0.1))
    layout, state = Layout(world.task.program), zerofl.init(world.task)
    masks = []
    with world.devices() as devices:
        for _ in range(5):
            zerofl.round(world.task, devices, state)
            masks.append(state.live)
            assert state.program.n_live == round(0.2 * layout.n_weights) + layout.n - layout.n_weights
    assert any((a != b).any() for a, b in pairwise(masks))


# --- costs, bad input, learning ---


def test_costs_of_a_round(bars: Path) -> None:
    world = make_world(small_config(bars, method="zerofl"))
    layout = Layout(world.task.program)
    state, [first, second] = rounds(world, 2)
    assert first.work.flops == 6 * first.samples * state.program.macs
    assert first.work.dense_flops == 6 * first.samples * layout.program.dense_macs
    n, others = layout.n_weights, layout.n - layout.n_weights
    sent = sum(sent_counts(layout, [int(state.live[layer.at].sum()) for layer in layout.layers], 0.2))
    assert first.traffic.bytes_up == 3 * (4 * (others + sent) + (n + 7) // 8)
    assert first.traffic.bytes_down == 3 * 4 * layout.n
    # What no device sent is 0 now, and need not be sent on.
    assert second.traffic.bytes_down < first.traffic.bytes_down
    _, [whole] = rounds(world, 1, zerofl__mask_ratio=1.0)
    assert whole.traffic.bytes_up == 3 * 4 * layout.n


def test_a_device_holds_dense_weights_and_those_that_came_if_it_sends_their_change(
    bars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "process_peak_bytes", lambda *_: None)
    world = make_world(small_config(bars, method="zerofl"))
    layout, state = Layout(world.task.program), zerofl.init(world.task)
    plain = bp_memory(world.task.program, 8, True).planned_bytes
    assert zerofl.device_memory(world.task, state).planned_bytes == plain + layout.mask_bytes
    other = world.changed(zerofl__uplink="diff-on-top-k").task
    assert zerofl.device_memory(other, state).planned_bytes == plain + layout.mask_bytes + 4 * layout.n


def test_a_density_that_leaves_nothing_is_refused_before_the_first_round(bars: Path) -> None:
    world = make_world(small_config(bars, method="zerofl"))
    with pytest.raises(ConfigError, match=r"prune.density = 0.04 is used up by .* zerofl.dense = last.*raise it"):
        zerofl.init(world.changed(prune__density=0.04).task)
    with pytest.raises(ConfigError, match=r"leave none for .*raise prune.density"):
        zerofl.init(world.changed(prune__density=0.005, zerofl__dense="none").task)


def test_digits_are_learnt() -> None:
    world = World(*prepare(load("zerofl", ["data.devices=10", "data.per_round=5", "data.beta=10.0"])))
    state = zerofl.init(world.task)
    with world.devices() as devices:
        for _ in range(12):
            zerofl.round(world.task, devices, state)
        accuracy, _ = devices.evaluate(state.program, state.values, state.stats)
    assert accuracy > 0.8

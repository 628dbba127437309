"""All weights as one vector, and the program of any mask of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed import models
from foreseed.engine import Engine, ForeseedError, Samples
from foreseed.methods.backprop import LocalTrainer
from foreseed.methods.moving_mask import Layout, largest, layers_kept, masked_mean
from foreseed.prune import prunable
from tests.methods.small import CLASSES, SHAPE, digits, lenet, pruned, with_batch_norm


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.9))
@settings(max_examples=10, deadline=None)
def test_the_program_of_a_mask_is_the_compiled_one(seed: int, density: float) -> None:
    model = lenet()
    layout = Layout(pruned(model, 1)[0])
    live = layout.everything.copy()
    rng = np.random.default_rng(seed)
    for layer in layout.layers:
        live[layer.at] = largest(rng.random(layer.size), max(1, round(density * layer.size)))

    mask = {
        name: torch.from_numpy(live[layer.at].copy()).view_as(module.weight)
        for (name, module), layer in zip(prunable(model).items(), layout.layers, strict=True)
    }
    program, values = models.compile(model, mask, input_shape=SHAPE, mean=(0.4,), std=(0.3,))
    dense = np.array(models.compile(model, input_shape=SHAPE, mean=(0.4,), std=(0.3,))[1])
    assert layout.pruned(live).bytes == program.bytes
    assert (dense[live] == np.array(values)).all()
    assert layout.macs(live) == program.macs
    assert layout.work(live, 3).flops == 6 * program.macs
    assert layout.density(live) == pytest.approx(density, abs=0.02)
    assert layout.value_bytes(live) == 4 * program.n_live


def test_a_mask_that_empties_a_layer_is_refused() -> None:
    layout = Layout(pruned(lenet(), 1)[0])
    live = layout.everything.copy()
    live[layout.layers[1].at] = False
    with pytest.raises(ForeseedError, match=f"no weight of {layout.layers[1].name}"):
        layout.pruned(live)


def test_a_weight_is_averaged_over_the_devices_that_have_it() -> None:
    one = (1.0, np.array([1, 2, 3, 4], np.float32), np.array([True, True, False, False]))
    two = (3.0, np.array([5, 6, 7, 8], np.float32), np.array([True, False, True, False]))
    mean = masked_mean([one, two], np.full(4, 9, np.float32))
    assert mean.tolist() == [4.0, 2.0, 7.0, 9.0]


def test_the_largest_of_equal_scores_are_the_first() -> None:
    assert largest(np.array([1.0, 3.0, 3.0, 2.0]), 1).tolist() == [False, True, False, False]
    among = np.array([True, False, False, True])
    assert largest(np.array([1.0, 3.0, 3.0, 2.0]), 1, among).tolist() == [False, False, False, True]


@pytest.mark.parametrize("model", [lenet, with_batch_norm])
def test_training_under_a_mask_is_training_the_program_of_that_mask(model: Callable[[], nn.Module]) -> None:
    net = model()
    program, values = pruned(net, 1)
    layout = Layout(program)
    live = layers_kept(layout, np.abs(values), [max(1, layer.size // 3) for layer in layout.layers])
    images, labels = digits(40)
    how = {"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "seed": (1, 2, 3)}
    here = LocalTrainer(net, program).train(values, images, labels, live=live, **how)
    there = LocalTrainer(net, layout.pruned(live)).train(values[live], images, labels, **how)
    assert (here.values[live] == there.values).all()
    assert (here.values[~live] == 0).all()
    assert (here.loss, here.stats.tolist()) == (there.loss, there.stats.tolist())


def test_a_mask_may_move_after_an_epoch() -> None:
    net = lenet()
    program, values = pruned(net, 1)
    layout, seen = Layout(program), []
    before = layers_kept(layout, np.abs(values), [layer.size // 2 for layer in layout.layers])
    after = layers_kept(layout, -np.abs(values), [layer.size // 2 for layer in layout.layers])

    def look(epoch: int, now: np.ndarray, gradient: np.ndarray) -> np.ndarray | None:
        seen.append((epoch, now, gradient))
        return after if epoch == 1 else None

    steps: list[np.ndarray] = []
    images, labels = digits(40)
    trained = LocalTrainer(net, program).train(
        values, images, labels, epochs=2, batch=16, lr=0.1, momentum=0.9, weight_decay=0.0, seed=(1,),
        live=before, each_step=steps.append, each_epoch=look,
    )  # fmt: skip
    assert [epoch for epoch, _, _ in seen] == [1, 2]
    assert len(steps) == 6
    assert (steps[2] == seen[0][2]).all()
    assert (steps[5] == seen[1][2]).all()
    assert (seen[0][1][~before] == 0).all()
    assert (seen[0][2][~before] != 0).any()  # gradients of pruned weights too
    assert (trained.values[~after] == 0).all()
    moved = after & (trained.values != 0)
    assert (moved & ~before).any()


def test_a_test_is_the_engines() -> None:
    net = lenet()
    program, values = pruned(net, 1)
    images, labels = digits(300)
    rows = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(300, -1)], axis=1)
    loss, correct = Engine(program, batch=8).loss(values, Samples.records(rows, program.image_bytes))
    mean, accuracy = LocalTrainer(net, program).test(values, images, labels)
    assert mean == pytest.approx(loss / 300, rel=1e-5)
    assert accuracy == correct / 300
    assert program.classes == CLASSES

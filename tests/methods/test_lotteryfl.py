"""LotteryFL: pruning, rewinding and averaging as its authors' code does them, and runs that keep to their masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed.config import ConfigError, load
from foreseed.draws import Draws
from foreseed.engine import Program
from foreseed.methods import Local, lotteryfl
from foreseed.methods.moving_mask import Layout, masked_mean
from foreseed.models import compile
from foreseed.runs import checkpoint
from foreseed.simulate import run_simulated
from tests.simulate.small import World, leave_out_the_slow, make_world, rows_of, small_config, write_bars


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)


# --- beside the authors' code ---

W0 = [
    .5, -.4, .3, -.2, .15, .25, -.35, .45, -.05, .1, .6, -.7, .01, .02, .03,
    .8, -.9, .2, -.1, .3, .7, .04, .05,
]  # fmt: skip
W = [
    .9, -.1, .35, .6, -.25, .05, .45, -.55, .15, -.8, .2, .7, .1, .2, .3,
    -.3, .65, .4, .75, -.85, .5, .4, .5,
]  # fmt: skip
"""Of two linear layers: 3 x 4 weights and 3 biases, 2 x 3 weights and 2 biases."""


def two_layers() -> Program:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return compile(net, input_shape=(1, 2, 2), mean=(0.5,), std=(0.5,))[0]


def as_mask(first: str, second: str) -> np.ndarray:
    """Both layers' masks as strings of 0 and 1, with their biases."""
    return np.array([c == "1" for c in first + "111" + second + "11"])


def test_the_weights_that_die_are_those_of_the_authors_code() -> None:
    """charleslipku/LotteryFL, src/utils.py: `mask_model` and `prune_by_percentile(model, mask, 30)`, three times."""
    layout, values = Layout(two_layers()), np.array(W, np.float32)
    live = layout.everything
    came_out = [
        as_mask("101110110101", "010111"), as_mask("100100010101", "010110"), as_mask("100000000101", "000110")
    ]  # fmt: skip
    for expected in came_out:
        live = lotteryfl.smaller_mask(layout, values, live, 0.3, 0.01)
        np.testing.assert_array_equal(live, expected)


def test_weights_are_averaged_as_in_the_authors_code() -> None:
    """The same file: `average_weights_with_masks` of W and W0 pruned by half, `mix_global_weights` with 7s."""
    layout = Layout(two_layers())
    w, w0 = np.array(W, np.float32), np.array(W0, np.float32)
    a, b = as_mask("100100110101", "010110"), as_mask("110000110011", "110001")
    np.testing.assert_array_equal(lotteryfl.smaller_mask(layout, w, layout.everything, 0.5, 0.01), a)
    np.testing.assert_array_equal(lotteryfl.smaller_mask(layout, w0, layout.everything, 0.5, 0.01), b)
    mean = masked_mean([(1.0, w, a), (1.0, w0, b)], np.full(len(W), 7, np.float32))
    came_out = [
        .7, -.4, 7, .6, 7, 7, .05, -.05, 7, -.8, .6, 0, .055, .11, .165, .8, -.125, 7, .75, -.85, .7, .22, .275
    ]  # fmt: skip
    np.testing.assert_allclose(mean, came_out, atol=1e-6)


# --- a device's steps ---


class Trainer:
    """Says how good a model is, and gives back what it was asked to train."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy, self.trained, self.tested = accuracy, [], []

    def test(self, values: np.ndarray, images: np.ndarray, *_: Any) -> tuple[float, float]:
        self.tested.append((values, len(images)))
        return 1.0, self.accuracy

    def train(self, values: np.ndarray, images: np.ndarray, *_: Any, **options: Any) -> Any:
        from foreseed.methods.backprop import Trained

        self.trained.append((values, len(images), options))
        return Trained(np.where(options["live"], values, 0).astype(np.float32), 0.5, np.zeros(0, np.float32))


def updated(world: World, accuracy: float, times: int = 1) -> tuple[Any, Trainer, lotteryfl.Ticket]:
    """A device's visit, after others in which all went well."""
    state = lotteryfl.init(world.task)
    state.values = state.values + np.float32(0.5)
    trainer: Any = Trainer(accuracy)
    images, labels = world.population.images(1)
    for _ in range(times):
        ticket = lotteryfl.client_update(world.task, state, Local(1, images, labels, trainer), 0.1)
        state.masks[1] = lotteryfl.packed(state.layout, ticket.live)
    return state, trainer, ticket


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(small_config(bars, method="lotteryfl", prune__density=0.5))


def test_a_device_whose_masked_model_does_well_prunes_and_rewinds(world: World) -> None:
    state, trainer, ticket = updated(world, 0.21)
    assert 0.79 < state.layout.density(ticket.live) < 0.81
    values, images, options = trainer.trained[0]
    np.testing.assert_array_equal(values, world.task.values)
    np.testing.assert_array_equal(options["live"], ticket.live)
    n = len(world.population.images(1)[1])
    assert images + trainer.tested[0][1] == n
    layout = state.layout
    assert ticket.bytes_down == layout.value_bytes(layout.everything)
    assert ticket.bytes_up == layout.value_bytes(ticket.live) + layout.mask_bytes
    passes = 2 * trainer.tested[0][1] + 3 * images
    assert ticket.work.forward_passes == passes
    assert ticket.work.flops < ticket.work.dense_flops == 2 * passes * world.task.program.dense_macs


def test_a_device_whose_masked_model_does_badly_trains_on_from_the_global_one(world: World) -> None:
    state, trainer, ticket = updated(world, 0.2)
    assert ticket.live.all()
    np.testing.assert_array_equal(trainer.trained[0][0], state.values)
    assert ticket.bytes_up == ticket.bytes_down == state.layout.value_bytes(ticket.live)


def test_a_device_stops_at_the_target_and_rewinds_no_more(world: World) -> None:
    state, trainer, ticket = updated(world, 1.0, times=6)
    for layer in state.layout.layers:
        assert ticket.live[layer.at].sum() == layer.size // 2
    np.testing.assert_array_equal(trainer.trained[-1][0], state.values)
    assert ticket.accuracy == 1.0
    np.testing.assert_array_equal(trainer.tested[-1][0] != 0, ticket.live & (state.values != 0))


@given(st.integers(0, 2**32 - 1), st.floats(0.17, 1), st.floats(0.01, 0.99))
@example(0, 0.9999999999999999, 0.5)  # all that is there, but for rounding
@settings(max_examples=50, deadline=None)
def test_pruning_always_comes_to_the_target_and_never_further(seed: int, target: float, share: float) -> None:
    layout = Layout(two_layers())
    values = np.random.default_rng(seed).normal(size=layout.n).astype(np.float32)
    live = layout.everything
    while not lotteryfl.is_done(layout, live, target):
        smaller = lotteryfl.smaller_mask(layout, values, live, share, target)
        assert not (smaller & ~live).any()
        assert smaller.sum() < live.sum()  # a device that is not done yet always drops something
        live = smaller
    for layer in layout.layers:
        assert live[layer.at].sum() == lotteryfl.weights_of(target, layer.size) >= 1
    np.testing.assert_array_equal(lotteryfl.unpacked(layout, lotteryfl.packed(layout, live)), live)


@given(st.integers(1, 300), st.floats(0.01, 0.99))
def test_every_image_is_either_learnt_or_held_out(n: int, share: float) -> None:
    tests, learnt = lotteryfl.held_out(n, share, Draws(1, "test"))
    assert len(tests) >= 1 <= len(learnt)
    assert sorted({*tests, *learnt}) == list(range(n))
    assert n == 1 or not {*tests} & {*learnt}


# --- whole runs ---


def test_a_density_that_empties_a_layer_is_refused_and_leaves_nothing(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, method="lotteryfl", prune__density=0.005)
    with pytest.raises(ConfigError, match=r"prune\.density 0\.005 leaves no weight of 0, which has 100"):
        run_simulated(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_personal_models_keep_to_their_masks_all_run_long(bars: Path, tmp_path: Path) -> None:
    config = small_config(
        bars, method="lotteryfl", rounds=24, prune__density=0.25, train__epochs=6, train__lr=0.1, train__batch=8
    )
    world = make_world(config)
    state, densities = lotteryfl.init(world.task), []
    with world.devices() as devices:
        for _ in range(24):
            before = state.masks.copy()
            result = lotteryfl.round(world.task, devices, state)
            changed = np.flatnonzero((state.masks != before).any(axis=1))
            assert set(changed) <= set(result.participants)
            assert not (state.masks & ~before).any()  # what died stays dead
            densities.append(result.personal_density)
    layout = state.layout
    own = [layout.density(lotteryfl.unpacked(layout, mask)) for mask in state.masks]
    target = sum(lotteryfl.weights_of(0.25, layer.size) for layer in layout.layers) / layout.n_weights
    assert min(own) == pytest.approx(target)
    assert max(own) < 0.5
    assert densities[-1] < densities[0]
    assert state.program.n_live == layout.n


def test_a_thousand_masks_take_a_bit_a_weight(bars: Path, tmp_path: Path) -> None:
    config = small_config(
        bars, method="lotteryfl", data__devices=1000, data__partition="iid", data__set="digits", data__per_round=2,
        model__name="lenet5", prune__density=0.2,
    )  # fmt: skip
    state = lotteryfl.init(make_world(config).task)
    checkpoint.save(tmp_path / "state.npz", 1, state)
    bits = 1000 * state.layout.n_weights / 8
    assert (tmp_path / "state.npz").stat().st_size < 1.1 * bits
    again = lotteryfl.init(make_world(config).task)
    state.masks[7] = lotteryfl.packed(state.layout, state.layout.everything) & 0x55
    checkpoint.save(tmp_path / "state.npz", 1, state)
    checkpoint.restore(tmp_path / "state.npz", again)
    np.testing.assert_array_equal(again.masks, state.masks)


def test_digits_are_learnt_by_personal_models(tmp_path: Path) -> None:
    config = load("lotteryfl", ["rounds=12", "train.epochs=3", "eval_every=12"])
    summary = run_simulated(config, tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert summary.personal_accuracy is not None
    assert summary.personal_accuracy > 0.8
    assert summary.personal_density == pytest.approx(0.5, abs=0.05)
    assert summary.density == 1
    assert rows[-1]["personal_accuracy"] > 0.7

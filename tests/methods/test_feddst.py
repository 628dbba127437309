"""FedDST: which weights are pruned, grown, averaged and pruned again; and whole runs at their density."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import cos, pi
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed import models
from foreseed.config import Config, ConfigError, load
from foreseed.methods import feddst
from foreseed.methods.feddst import Settings, layer_counts, ratio_at, readjust, readjusts_after
from foreseed.methods.moving_mask import Layout
from foreseed.simulate import run_simulated
from tests.simulate.small import (
    TINY,
    WITH_BATCH_NORM,
    World,
    leave_out_the_slow,
    make_world,
    rows_of,
    small_config,
    write_bars,
)

W = [
    0.9, -0.1, 0.5, 0.05, -0.6, 0.2, -0.3, 0.8, 0.15, -0.7, 0.4, -0.25,
    -0.35, 0.45, 0.02, -0.95, 0.65, 0.12, -0.08, 0.55, -0.75, 0.28, 0.33, -0.18,
]  # fmt: skip
GRADIENT = [
    0.1, 0.7, -0.2, 0.9, 0.3, -0.8, 0.05, -0.4, 0.6, 0.01, -0.15, 0.5,
    0.2, -0.9, 0.8, 0.1, 0.05, -0.7, 0.6, 0.3, 0.02, -0.4, 0.15, 0.5,
]  # fmt: skip
HALF = "101010010110" + "110110011000"
"""The larger half of W, layer by layer."""
QUARTER = "100000010100" + "000110001000"


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)


def two_layers() -> Layout:
    """Four inputs, three units, four classes; no biases, so that values are weights."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    return Layout(models.compile(net, input_shape=(1, 2, 2), mean=(0.5,), std=(0.5,))[0])


@cache
def lenet(*, bias: bool) -> Layout:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 5, bias=bias), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5, bias=bias), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120, bias=bias), nn.ReLU(), nn.Linear(120, 84, bias=bias),
        nn.ReLU(), nn.Linear(84, 10, bias=bias),
    )  # fmt: skip
    return Layout(models.compile(net, input_shape=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)[0])


def mask(bits: str) -> np.ndarray:
    return np.array([bit == "1" for bit in bits])


def bits(live: np.ndarray) -> str:
    return "".join("01"[bit] for bit in live.astype(int))


def floats(numbers: list[float]) -> np.ndarray:
    return np.array(numbers, np.float32)


# --- beside the authors' code ---


def test_readjustment_moves_the_weights_that_the_authors_code_does() -> None:
    """bibikar/feddst, models.py, PrunableNet: layer_prune(0.5), layer_prune(0.75), then layer_grow(0.5), uniform."""
    weights = np.where(mask(HALF), floats(W), np.float32(0))
    moved = readjust(two_layers(), weights, floats(GRADIENT), mask(HALF), fewer=[3, 3], counts=[6, 6])
    assert bits(moved) == "110101010100" + "011111001000"
    assert weights[moved & mask(QUARTER)].tolist() == floats([0.9, 0.8, -0.7, -0.95, 0.65, -0.75]).tolist()
    assert not weights[moved & ~mask(QUARTER)].any()


def test_growth_passes_over_what_lives_where_the_authors_code_does_not() -> None:
    """The same with two gradients that are largest at weights which live: layer_grow chooses and zeroes them."""
    gradient = floats(GRADIENT)
    gradient[0], gradient[12 + 8] = 0.95, -0.85
    weights = np.where(mask(HALF), floats(W), np.float32(0))
    theirs = weights.copy()
    moved = readjust(two_layers(), theirs, gradient, mask(HALF), [3, 3], [6, 6], grow_anywhere=True)
    assert bits(moved) == "100101010100" + "011110001000"
    assert theirs[moved & mask(QUARTER)].tolist() == floats([0, 0.8, -0.7, -0.95, 0.65, 0]).tolist()

    moved = readjust(two_layers(), weights, gradient, mask(HALF), [3, 3], [6, 6])
    assert bits(moved) == "110101010100" + "011111001000"
    assert weights[moved & mask(QUARTER)].tolist() == floats([0.9, 0.8, -0.7, -0.95, 0.65, -0.75]).tolist()


def test_averaging_and_pruning_again_come_to_what_the_authors_server_does() -> None:
    """bibikar/feddst, dst.py: one turn of the server's loop with two devices of weights 6 and 2, uniform, 0.5."""
    a = [
        0.9, 0.0, 0.5, 0.07, -0.6, 0.0, 0.0, 0.8, 0.0, -0.7, 0.0, 0.3,
        0.0, 0.45, 0.11, -0.95, 0.65, 0.0, 0.0, 0.0, -0.75, 0.0, 0.33, 0.0,
    ]  # fmt: skip
    b = [
        0.7, -0.2, 0.0, 0.0, -0.4, 0.0, 0.25, 0.6, 0.0, -0.9, 0.0, 0.0,
        -0.35, 0.0, 0.0, -0.75, 0.85, 0.12, 0.0, 0.0, -0.15, 0.0, 0.53, 0.0,
    ]  # fmt: skip
    weights, live = combined([(6, a), (2, b)])
    assert bits(live) == "101010010101" + "110110001010"
    expected = [0.85, 0.5, -0.55, 0.75, -0.75, 0.3, -0.35, 0.45, -0.9, 0.7, -0.6, 0.38]
    np.testing.assert_allclose(weights[live], expected, rtol=1e-6)


def combined(devices: list[tuple[int, list[float]]], **own: Any) -> tuple[np.ndarray, np.ndarray]:
    config = Config().with_({"method": "feddst", "prune.density": 0.5} | {f"feddst.{k}": v for k, v in own.items()})
    state = SimpleNamespace(layout=two_layers(), counts=[6, 6], weights=np.zeros(24, np.float32), live=mask(HALF))
    none = np.zeros(0, np.float32)
    updates = [feddst.Update(n, floats(w), none, 0.0, floats(w) != 0, 1) for n, w in devices]
    return feddst.combine(SimpleNamespace(config=config), state, updates)


@pytest.mark.parametrize(
    ("density", "counts"),
    [(0.5, [231, 1199, 23921, 5071, 461]), (0.2, [100, 478, 9474, 2066, 234]), (0.1, [56, 238, 4658, 1064, 159])],
)
def test_layers_have_as_many_weights_as_in_the_authors_code(density: float, counts: list[int]) -> None:
    """bibikar/feddst, models.py, PrunableNet._weights_by_layer("erk"), of LeNet-5; it rounds every layer down."""
    ours = layer_counts(lenet(bias=False), density, "feddst")
    assert sum(ours) == round(density * 61_770)
    assert all(0 <= mine - theirs <= 1 for mine, theirs in zip(ours, counts, strict=True))


# --- by hand ---


def test_weights_that_grew_are_kept_by_votes_where_there_is_room() -> None:
    """Both devices dropped one weight of the first layer; what they grew is 0, and one place is free."""
    a, b = (np.where(mask(HALF), floats(W), np.float32(0)) for _ in range(2))
    masks = [mask(HALF), mask(HALF)]
    for live, values in zip(masks, (a, b), strict=True):
        live[10] = values[10] = 0
    masks[0][1] = masks[1][5] = True
    layout, votes = two_layers(), 10 * masks[0] + 30.0 * masks[1]
    live = feddst.prune_again(layout, a, votes, [6, 6])
    assert bits(live) == "101011010100" + HALF[12:]


def test_layers_of_erk_are_dense_before_they_overflow() -> None:
    layout = lenet(bias=False)
    counts = layer_counts(layout, 0.2, "erk")
    assert sum(counts) == round(0.2 * layout.n_weights)
    edges = [6 + 3 + 5 + 5, 16 + 6 + 5 + 5, 120 + 400, 84 + 120, 10 + 84]
    r = [edge / layer.size for edge, layer in zip(edges, layout.layers, strict=True)]
    shares = [count / layer.size for count, layer in zip(counts, layout.layers, strict=True)]
    free = [share / each for share, each in zip(shares, r, strict=True) if share < 1]
    assert shares[4] == 1.0
    assert len(free) >= 2
    np.testing.assert_allclose(free, free[0], rtol=0.02)


@pytest.mark.parametrize(("distribution", "share"), [("uniform", 0.2), ("feddst", 0.212), ("erk", 0.430)])
def test_the_arithmetic_that_a_distribution_leaves_of_lenet5(distribution: str, share: float) -> None:
    layout = lenet(bias=True)
    live = layout.everything.copy()
    for layer, count in zip(layout.layers, layer_counts(layout, 0.2, distribution), strict=True):
        live[layer.at] = np.arange(layer.size) < count
    assert layout.macs(live) / layout.program.macs == pytest.approx(share, abs=0.002)


@given(st.floats(0.02, 1), st.sampled_from(["uniform", "feddst", "erk"]))
@settings(max_examples=60, deadline=None)
def test_the_density_is_reached_to_the_weight(density: float, distribution: str) -> None:
    layout = lenet(bias=False)
    counts = layer_counts(layout, density, distribution)
    assert sum(counts) == round(density * layout.n_weights)
    assert all(0 < count <= layer.size for count, layer in zip(counts, layout.layers, strict=True))


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.9), st.floats(0.2, 1))
@settings(max_examples=60, deadline=None)
def test_a_readjusted_layer_has_its_count(seed: int, alpha: float, density: float) -> None:
    rng, layout = np.random.default_rng(seed), two_layers()
    counts = layer_counts(layout, density, "uniform")
    weights, gradient = (rng.normal(size=24).astype(np.float32) for _ in range(2))
    live = np.concatenate([rng.permutation(12) < count for count in counts])
    before = weights.copy()
    moved = readjust(layout, weights, gradient, live, layer_counts(layout, density * (1 - alpha), "uniform"), counts)
    assert [int(moved[layer.at].sum()) for layer in layout.layers] == counts
    assert (weights[moved] != 0).sum() == (moved & live & (weights == before)).sum()
    if density == 1:
        assert (weights == before).all()


def test_alpha_falls_along_a_cosine_and_the_authors_does_not() -> None:
    own = Settings(every=5, ratio=0.1)
    due = {number: ratio_at(own, number, rounds=60) for number in range(1, 61) if ratio_at(own, number, 60)}
    assert due == {n: pytest.approx(0.05 * (1 + cos(pi * (n - 1) / 30))) for n in (5, 10, 15, 20, 25, 30)}
    theirs = Settings(every=5, ratio=0.1, compat=True)
    assert {n: ratio_at(theirs, n, 60) for n in range(1, 61) if ratio_at(theirs, n, 60)} == dict.fromkeys(
        (2, 7, 12, 17, 22, 27), 0.1
    )
    assert ratio_at(Settings(every=1, ratio=0.2, decay_end=2), 2, 60) == pytest.approx(0.1)


def test_devices_readjust_after_one_epoch_and_the_authors_after_every_tenth_of_their_lives() -> None:
    assert readjusts_after(Settings(), epochs=5, before=5) == {5}
    assert readjusts_after(Settings(epoch=2), epochs=5, before=5) == {2}
    theirs = Settings(compat=True)
    assert [readjusts_after(theirs, 5, before) for before in (0, 5, 10, 15)] == [set(), {5}, set(), {5}]
    assert readjusts_after(theirs, 4, 8) == {2}


def test_the_authors_weigh_devices_by_batches() -> None:
    a, b = ([x, *W[1:]] for x in (1.0, 3.0))
    assert combined([(33, a), (32, b)])[0][0] == pytest.approx((33 * 1 + 32 * 3) / 65)
    assert combined([(33, a), (32, b)], compat=True)[0][0] == pytest.approx((2 * 1 + 1 * 3) / 3)


# --- rounds ---


def rounds(world: World, count: int) -> tuple[feddst.State, list[feddst.RoundResult], list[np.ndarray]]:
    state, masks = feddst.init(world.task), []
    with world.devices() as devices:
        rows = []
        for _ in range(count):
            rows.append(feddst.round(world.task, devices, state))
            masks.append(state.live.copy())
    return state, rows, masks


@pytest.mark.parametrize("model", [TINY, WITH_BATCH_NORM])
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_mask_moves_and_the_density_stays(model: str, epoch: int, bars: Path) -> None:
    world = make_world(
        small_config(
            bars,
            method="feddst",
            rounds=8,
            model__name=model,
            train__epochs=2,
            train__lr=0.1,
            feddst__every=2,
            feddst__ratio=0.5,
            feddst__epoch=epoch,
        )
    )
    state, rows, masks = rounds(world, 6)
    layout = state.layout
    assert {int(m.sum()) for m in masks} == {state.program.n_live}
    assert [[int(m[layer.at].sum()) for layer in layout.layers] for m in masks] == [state.counts] * 6
    assert sum(state.counts) == round(0.3 * layout.n_weights)
    moved = [not np.array_equal(*pair) for pair in pairwise([feddst.init(world.task).live, *masks])]
    assert moved == [False, True, False, True, False, False]  # rounds 2 and 4; in round 6 alpha has fallen to 0
    assert not state.weights[~state.live].any()
    assert state.values.size == state.program.n_live
    assert np.isfinite([row.train_loss for row in rows]).all()


def test_what_a_device_sends_receives_and_computes(bars: Path) -> None:
    world = make_world(
        small_config(
            bars, method="feddst", rounds=8, data__per_round=6, train__epochs=3, feddst__every=2, feddst__ratio=0.5
        )
    )
    state, rows, masks = rounds(world, 3)
    layout, n_live = state.layout, state.program.n_live
    mask_bytes = (layout.n_weights + 7) // 8
    values = 6 * 4 * n_live
    assert [row.traffic.bytes_up for row in rows] == [values, values + 6 * mask_bytes, values]
    assert [row.traffic.bytes_down for row in rows] == [values, values, values + 6 * mask_bytes]
    macs = [layout.macs(m) for m in (feddst.init(world.task).live, *masks)]
    last = sum((int(n) - 1) % 8 + 1 for n in world.population.partition.sizes)
    assert rows[0].work.flops == 2 * 3 * 3 * rows[0].samples * macs[0]
    assert rows[0].work.forward_passes == 3 * 3 * rows[0].samples
    extra = 2 * last * (world.task.program.macs - macs[1])
    assert rows[1].work.flops == 2 * 3 * 3 * rows[1].samples * macs[1] + extra
    assert rows[1].work.dense_flops == 2 * 3 * 3 * rows[1].samples * world.task.program.macs


def test_what_a_device_grew_is_sent_as_0_or_trained(bars: Path) -> None:
    config = small_config(
        bars, method="feddst", rounds=4, train__epochs=2, feddst__every=1, feddst__ratio=0.5, feddst__epoch=2
    )
    world = make_world(config)
    state = feddst.init(world.task)
    fewer = layer_counts(state.layout, 0.3 * (1 - ratio_at(config.own(Settings), 1, 4)), "feddst")

    def zeros(world: World) -> int:
        with world.devices() as devices:
            work = lambda local: feddst.client_update(world.task, state, 0.05, local)  # noqa: E731
            [update] = devices.visit(world.task.program, [0], work)
        assert [int(update.live[layer.at].sum()) for layer in state.layout.layers] == state.counts
        assert not update.values[~update.live].any()
        return sum(int((update.values[layer.at][update.live[layer.at]] == 0).sum()) for layer in state.layout.layers)

    assert zeros(world) == sum(state.counts) - sum(fewer) > 20
    assert zeros(world.changed(feddst__epoch=1)) < 5


# --- whole runs ---


def test_compat_runs_too(bars: Path, tmp_path: Path) -> None:
    config = small_config(
        bars, method="feddst", rounds=8, train__epochs=10, feddst__every=2, feddst__ratio=0.3, feddst__compat=True
    )
    run_simulated(config, tmp_path / "run")
    n_live = [row["n_live"] for row in rows_of(tmp_path / "run")]
    layout = Layout(make_world(config).task.program)
    fixed = layout.n - layout.n_weights
    assert max(n_live) == n_live[0] == fixed + round(0.3 * layout.n_weights)


def test_it_learns_the_digits(tmp_path: Path) -> None:
    summary = run_simulated(load("feddst", ["rounds=12", "eval_every=12", "workers=1"]), tmp_path / "run")
    assert summary.final_accuracy > 0.85
    assert {row["n_live"] for row in rows_of(tmp_path / "run")} == {summary.n_live}
    assert summary.density == pytest.approx(0.2, abs=1e-4)


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feddst__every": 9}, "lower feddst.every or raise rounds"),
        ({"feddst__every": 3, "rounds": 4}, "masks rest after 2 of 4 rounds"),
        ({"prune__density": 0.002, "feddst__distribution": "uniform"}, "leaves no weight of .*; raise prune.density"),
        ({"feddst__epoch": 2}, "feddst.epoch = 2, but a device trains for train.epochs = 1"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(
    changes: dict[str, Any], said: str, bars: Path, tmp_path: Path
) -> None:
    config = small_config(bars, **{"method": "feddst", "rounds": 8, "feddst__every": 2} | changes)
    with pytest.raises(ConfigError, match=said) as refused:
        run_simulated(config, tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()

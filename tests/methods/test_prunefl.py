"""PruneFL: where its greedy stops, what its port makes of it, and whole runs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed import models
from foreseed.config import ConfigError, load
from foreseed.methods import prunefl
from foreseed.methods.moving_mask import Layout
from foreseed.methods.prunefl import Settings, Times, port_mask, reconfigured, settled, times_of
from foreseed.runs import checkpoint
from foreseed.simulate import run_simulated
from tests.simulate.small import (
    TINY,
    WITH_BATCH_NORM,
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
SQUARES = [
    0.81, 0.05, 0.64, 0.3, 0.49, 0.64, 0.36, 0.16, 0.16, 0.25, 0.04, 0.09,
    0.25, 0.16, 0.04, 0.36, 0.09, 0.1, 0.02, 0.49, 0.2, 0.06, 0.03, 0.12,
]  # fmt: skip
LIVE = "111010110111" + "110111011110"

INITIAL = {"prunefl__every": 2, "prunefl__initial_rounds": 24, "prunefl__initial_images": 16}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars") / "bars.npz")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)


def two_layers(*, bias: bool = False) -> Layout:
    """Four inputs, three units, four classes."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=bias), nn.Linear(3, 4, bias=bias))
    return Layout(models.compile(net, input_shape=(1, 2, 2), mean=(0.5,), std=(0.5,))[0])


def mask(bits: str) -> np.ndarray:
    return np.array([bit == "1" for bit in bits])


def bits(live: np.ndarray) -> str:
    return "".join("01"[bit] for bit in live.astype(int))


# --- beside public code ---


@pytest.mark.parametrize(
    ("removable", "constant", "seconds", "found"),
    [
        (0.3, 2.0, (0.4, 0.1), "101011110110" + "110111011011"),
        (0.3, 0.5, (0.3, 0.1), "101011110110" + "110110011010"),
        (0.3, 0.5, (0.1, 0.2), "101111110110" + "110110011010"),
        (0.3, 8.0, (0.3, 0.2), "101111111110" + "110111011011"),
        (0.6, 2.0, (0.4, 0.1), "101011010100" + "110111011001"),
        (0.6, 0.5, (0.3, 0.1), "101011010100" + "110110011000"),
        (0.6, 0.5, (0.1, 0.2), "101111110100" + "000110011000"),
        (0.6, 8.0, (0.3, 0.2), "101111111100" + "110111011001"),
    ],
)
def test_reconfiguration_stops_where_the_authors_code_does(
    removable: float, constant: float, seconds: tuple[float, float], found: str
) -> None:
    """jiangyuang/PruneFL, control/algorithm.py, ControlModule.adjust(removable), with TIME_CONSTANT = constant."""
    times = Times(np.array(seconds), constant)
    weights = np.array(W, np.float32)
    assert bits(reconfigured(two_layers(), weights, mask(LIVE), np.array(SQUARES), times, removable)) == found


GRADIENT = [
    0.1, 0.7, -0.2, 0.9, 0.3, -0.8, 0.05, -0.4, 0.6, 0.01, -0.15, 0.5,
    0.2, -0.9, 0.8, 0.1, 0.05, -0.7, 0.6, 0.3, 0.02, -0.4, 0.15, 0.5,
]  # fmt: skip


@pytest.mark.parametrize(
    ("removable", "found"),
    [(0.3, "011111011011" + "111001110101"), (0.9, "010101011001" + "011001100101")],
)
def test_compat_finds_the_ports_mask(removable: float, found: str) -> None:
    """bibikar/feddst, models.py, PrunableNet.prunefl_readjust, with layer_times 4e-3 and 1e-3."""
    times = Times(np.array([4e-3, 1e-3]), constant=9.0)
    # The port sorts equal squares in no order that it promises; there are some here, but none where it stops.
    squares = np.square(np.array(GRADIENT, np.float32)).astype(np.float64)
    assert bits(port_mask(two_layers(), squares, times, removable)) == found


# --- by hand ---


def gamma(chosen: np.ndarray, squares: np.ndarray, seconds: np.ndarray, constant: float) -> float:
    return squares[chosen].sum() / (constant + seconds[chosen].sum())


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 10), st.floats(0.05, 5))
@settings(max_examples=40, deadline=None)
def test_no_other_mask_has_a_larger_gamma(seed: int, constant: float, second: float) -> None:
    rng, layout = np.random.default_rng(seed), two_layers()
    weights, squares = rng.normal(size=24).astype(np.float32), rng.exponential(size=24) ** 3
    live = np.concatenate([rng.permutation(12) < 10] * 2)
    times = Times(np.array([1.0, second]), constant)
    found = reconfigured(layout, weights, live, squares, times, removable=0.3)
    stays = live.copy()
    for first in (0, 12):
        order = sorted((i for i in range(first, first + 12) if live[i]), key=lambda i: abs(weights[i]))
        stays[order[:3]] = False
    free = np.flatnonzero(~stays)
    seconds = np.repeat(times.layers, 12)
    best = 0.0
    for choice in product((False, True), repeat=len(free)):
        tried = stays.copy()
        tried[free[list(choice)]] = True
        best = max(best, gamma(tried, squares, seconds, constant))
    assert found[stays].all()
    assert gamma(found, squares, seconds, constant) == pytest.approx(best, rel=1e-12)


def test_biases_count_as_kept_and_stay() -> None:
    """A bias with a large gradient raises Gamma, so fewer weights are worth their time."""
    layout, times = two_layers(bias=True), Times(np.array([0.3, 0.2]), 8.0)
    places = np.concatenate([np.arange(layer.at.start, layer.at.stop) for layer in layout.layers])
    others = np.setdiff1d(np.arange(layout.n), places)
    weights, live, squares = np.ones(31, np.float32), np.ones(31, bool), np.zeros(31)
    weights[places], live[places], squares[places] = W, mask(LIVE), SQUARES
    plain = reconfigured(layout, weights, live, squares, times, 0.3)
    assert bits(plain[places]) == "101111111110" + "110111011011"
    squares[others] = 1.0
    raised = reconfigured(layout, weights, live, squares, times, 0.3)
    assert plain[others].all()
    assert raised[others].all()
    assert raised.sum() < plain.sum()


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1), st.floats(0.05, 0.9))
@settings(max_examples=60, deadline=None)
def test_a_cap_holds_and_leaves_room_for_gradients(seed: int, cap: float, removable: float) -> None:
    rng, layout = np.random.default_rng(seed), two_layers()
    weights, squares = rng.normal(size=24).astype(np.float32), rng.exponential(size=24)
    times = Times(np.array([1.0, 1.0]), constant=1e9)  # all weights are worth their time
    found = reconfigured(layout, weights, np.ones(24, bool), squares, times, removable, cap)
    assert found.sum() == int(cap * 24)
    assert all(found[layer.at].any() for layer in layout.layers)


def test_initial_pruning_is_over_when_the_density_has_hardly_moved_five_times() -> None:
    assert not settled([0.7, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert settled([0.7, 0.5, 0.5, 0.46, 0.5, 0.5, 0.5])
    assert not settled([0.5, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4])
    assert not settled([0.5] * 5)


def test_times_are_those_of_computing_and_of_the_link() -> None:
    own = Settings(bytes_per_second=8e3, fixed_share=0.5)
    times = times_of(own, two_layers(), np.array([2e-3, 5e-3]), images=10)
    np.testing.assert_allclose(times.layers, [0.021, 0.051])
    assert times.constant == pytest.approx(12 * 0.021 + 12 * 0.051)


# --- rounds ---


@pytest.mark.parametrize("model", [TINY, WITH_BATCH_NORM])
def test_it_prunes_first_and_reconfigures_every_so_often(model: str, bars: Path) -> None:
    world = make_world(small_config(bars, method="prunefl", rounds=6, model__name=model, **INITIAL))
    state = prunefl.init(world.task)
    layout, n_live, moved = state.layout, [], []
    assert state.program.n_live == layout.n
    with world.devices() as devices:
        for _ in range(6):
            before = state.live
            result = prunefl.round(world.task, devices, state)
            n_live.append(state.program.n_live)
            moved.append(not np.array_equal(before, state.live))
            assert np.isfinite(result.train_loss)
            assert not state.weights[~state.live].any()
    assert n_live[0] < 0.9 * layout.n
    assert moved == [True, True, False, True, False, True]
    assert all(state.live[layer.at].any() for layer in layout.layers)


def test_what_devices_send_receive_and_compute(bars: Path) -> None:
    world = make_world(
        small_config(bars, method="prunefl", rounds=6, data__per_round=6, train__epochs=2, **INITIAL)
        .with_({"prunefl.initial_rounds": 0})
    )  # fmt: skip
    state, task = prunefl.init(world.task), world.task
    with world.devices() as devices:
        rows = [prunefl.round(task, devices, state) for _ in range(3)]
    layout, dense = state.layout, task.program.macs
    assert rows[0].traffic.bytes_up == rows[0].traffic.bytes_down == 6 * 4 * layout.n
    assert rows[1].traffic.bytes_up == 6 * 4 * (layout.n + layout.n)
    assert rows[2].traffic.bytes_down == 6 * (4 * state.program.n_live + (layout.n_weights + 7) // 8)
    assert rows[2].traffic.bytes_up == 6 * 4 * state.program.n_live
    assert rows[1].work.flops == rows[1].work.dense_flops == 2 * 3 * 2 * rows[1].samples * dense
    assert rows[2].work.flops == 2 * 3 * 2 * rows[2].samples * layout.macs(state.live)
    live = layout.macs(state.live)
    with world.devices() as devices:
        fourth = prunefl.round(task, devices, state)
    assert fourth.work.flops == 2 * 2 * fourth.samples * (2 * live + dense)
    assert fourth.work.forward_passes == 3 * 2 * fourth.samples


def test_initial_pruning_costs_its_device(bars: Path) -> None:
    world = make_world(small_config(bars, method="prunefl", **INITIAL))
    costs = []
    for initial in (0, 10):
        changed = world.changed(prunefl__initial_rounds=initial)
        with changed.devices() as devices:
            costs.append(prunefl.round(changed.task, devices, prunefl.init(changed.task)))
    images = 10 * 16  # dense, forward and backward; and one test of all
    passes = costs[1].work.forward_passes - costs[0].work.forward_passes
    assert passes == 3 * images + 16


def test_measured_times_are_kept_with_the_state(bars: Path, tmp_path: Path) -> None:
    world = make_world(small_config(bars, method="prunefl", prunefl__times="measured", **INITIAL))
    state, again = prunefl.init(world.task), prunefl.init(world.task)
    assert (state.seconds > 0).all()
    assert len(state.seconds) == len(state.layout.layers)
    again.seconds = 2 * state.seconds
    checkpoint.save(tmp_path / "state.npz", 0, state)
    checkpoint.restore(tmp_path / "state.npz", again)
    assert (again.seconds == state.seconds).all()


# --- whole runs ---


def test_a_cap_holds_all_run_long(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, method="prunefl", rounds=6, prunefl__max_density=0.3, **INITIAL)
    run_simulated(config, tmp_path / "run")
    layout = Layout(make_world(config).task.program)
    most = layout.n - layout.n_weights + int(0.3 * layout.n_weights)
    assert all(row["n_live"] <= most for row in rows_of(tmp_path / "run"))


def test_compat_goes_dense(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, method="prunefl", rounds=16, prunefl__compat=True, **INITIAL)
    summary = run_simulated(config, tmp_path / "run")
    first = rows_of(tmp_path / "run")[0]
    assert first["n_live"] < summary.n_live
    assert summary.density == 1.0


def test_it_learns_the_digits(tmp_path: Path) -> None:
    summary = run_simulated(load("prunefl", ["rounds=12", "eval_every=12", "workers=1"]), tmp_path / "run")
    assert summary.final_accuracy > 0.8
    assert summary.density < 0.7


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prunefl__every": 9}, "prunefl.every = 9 is longer than the run of 6 rounds"),
        ({"prunefl__max_density": 0.2, "prunefl__initial_rounds": 0}, "raise prunefl.initial_rounds"),
        ({"prunefl__max_density": 0.001}, "less than a weight for each of 3 layers; raise it"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(
    changes: dict[str, Any], said: str, bars: Path, tmp_path: Path
) -> None:
    config = small_config(bars, **{"method": "prunefl", "rounds": 6} | INITIAL | changes)
    with pytest.raises(ConfigError, match=said) as refused:
        run_simulated(config, tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()

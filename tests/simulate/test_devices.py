"""The devices of a simulation: what they answer, how much they compute, and that threads change nothing."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foreseed import models
from foreseed.data import load
from foreseed.engine import SHARED_DEVICE, Directions, Engine, Samples, direction, in_parts, quantise
from foreseed.methods import ntk_baffle
from foreseed.methods import workers as workers_module
from foreseed.methods.ntk_baffle import learn
from foreseed.simulate import SimulatedDevices
from foreseed.wire import CHUNK, NOTHING_HELD, PROGRAM, STATE, Chunk, Fetch, Reply, decode, encode
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, small_config


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(small_config(bars))


@pytest.fixture(scope="module")
def norm_world(bars: Path) -> World:
    return make_world(small_config(bars, model__name=WITH_BATCH_NORM))


# --- replies ---


@pytest.mark.parametrize("engine", ["difference", "exact"])
def test_replies_are_the_same_bits_for_any_number_of_workers(world: World, engine: str) -> None:
    one, two, five = (world.changed(engine=engine, workers=n, data__per_round=6).ask()[1] for n in (1, 2, 5))
    assert one == two == five
    assert [reply.device for reply in one] == list(range(6))


def test_replies_are_what_the_coordinator_takes_and_the_wire_carries(norm_world: World) -> None:
    coordinator, replies = norm_world.changed(train__spread=2, train__local_steps=2).ask()
    for reply in replies:
        assert decode(encode(reply)) == reply
        assert coordinator.receive(reply) is None
    assert learn(coordinator).samples == sum(reply.samples for reply in replies)


def found(reply: Reply) -> array[float]:
    """The loss differences of a reply that does not pack them."""
    return array("f", reply.losses)[1:]


@pytest.mark.parametrize("engine", ["difference", "exact"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_few_bits_are_packed_of_the_very_differences_that_are_sent_otherwise(
    norm_world: World, engine: str, bits: int
) -> None:
    whole, packed = (norm_world.changed(engine=engine, train__bits=b, train__k=7).ask()[1] for b in (32, bits))
    for full, short in zip(whole, packed, strict=True):
        scale, codes = quantise(found(full), bits, norm_world.config.seed, 1, full.device)
        assert short == full._replace(run=short.run, losses=array("f", [full.base_loss, scale]).tobytes() + codes)


def test_difference_is_the_mean_loss_along_a_direction_minus_that_at_the_values(world: World) -> None:
    coordinator, replies = world.ask()
    engine, values = Engine(world.task.program), coordinator.state.values
    for reply in replies:
        samples = world.population.samples(reply.device)
        base = engine.loss(values, samples)[0] / samples.count
        assert reply.base_loss == np.float32(base)
        assert reply.samples == samples.count == world.population.partition.sizes[reply.device]
        d = Directions(world.config.seed, 1, reply.device, count=6)
        for k, difference in enumerate(found(reply)):
            moved = values + np.float32(1e-4) * np.array(direction(d, k, len(values)), np.float32)
            assert difference == np.float32(engine.loss(moved, samples)[0] / samples.count - base)


def test_torch_has_its_threads_back_when_a_fleet_closes(world: World) -> None:
    torch.set_num_threads(2)
    with world.devices():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


# --- local steps ---


def own_steps(world: World, reply: Reply, values: np.ndarray) -> np.ndarray:
    """Where a device's own steps lead, from its differences: each goes down the estimate of its own directions."""
    t, w = world.config.train, values.astype(np.float64)
    for step in range(t.local_steps):
        d = Directions(world.config.seed, reply.round, reply.device, t.k, first=step * t.k, kind=t.direction)
        g = sum(
            difference / t.sigma / t.k * np.array(direction(d, k, len(w)), np.float64)
            for k, difference in zip(d.numbers(), found(reply)[step * t.k : (step + 1) * t.k], strict=True)
        )
        w -= t.local_lr * g
    return w


@pytest.mark.parametrize("spread", [1, 2])
def test_servers_aggregate_is_the_mean_of_the_devices_own_trajectories(world: World, spread: int) -> None:
    settings = {"local_steps": 3, "local_lr": 0.05, "spread": spread, "lr": 0.05, "momentum": 0.0, "lr_decay": 1.0}
    there = world.changed(**{f"train__{key}": value for key, value in settings.items()})
    coordinator, replies = there.ask()
    before = coordinator.state.values.copy()
    for reply in replies:
        assert len(found(reply)) == 18
        assert coordinator.receive(reply) is None
    learn(coordinator)
    total = sum(reply.samples for reply in replies)
    mean = sum(reply.samples / total * own_steps(there, reply, before) for reply in replies)
    moved = np.linalg.norm(mean - before)
    assert moved > 0.01
    np.testing.assert_allclose(coordinator.state.values, mean, atol=1e-5 * moved)


@pytest.mark.parametrize("spread", [1, 2])
def test_each_local_step_probes_where_the_steps_before_it_led(world: World, spread: int) -> None:
    there = world.changed(train__local_steps=3, train__local_lr=0.05, train__spread=spread)
    coordinator, replies = there.ask()
    engine, t = Engine(world.task.program), there.config.train
    for reply in replies:
        samples = world.population.samples(reply.device)
        half = samples.count // 2
        parts = [samples] if spread == 1 else [samples.part(0, half), samples.part(half, samples.count - half)]
        for step in range(3):
            so_far = reply._replace(losses=reply.losses[: 4 + 4 * step * t.k])
            at = there.changed(train__local_steps=step) if step else None
            w = (own_steps(at, so_far, coordinator.state.values) if at else coordinator.state.values).astype(np.float32)
            d = Directions(there.config.seed, 1, reply.device, t.k, first=step * t.k)
            for i, k in enumerate(d.numbers()):
                part = parts[i % spread]
                moved = w + np.float32(t.sigma) * np.array(direction(d, k, len(w)), np.float32)
                expected = (engine.loss(moved, part)[0] - engine.loss(w, part)[0]) / part.count
                assert found(reply)[step * t.k + i] == pytest.approx(expected, rel=2e-2, abs=3e-7)


# --- what is counted is what is run ---


class Counting(Engine):
    """An engine that counts the images which it takes forward, one probe after the other."""

    passes = 0

    def loss(self, values: Any, samples: Samples, stats: Any = None) -> tuple[float, int]:
        Counting.passes += samples.count
        return super().loss(values, samples, stats)

    def probe(self, values: Any, samples: Samples, directions: Directions, stats: Any = None) -> array[float]:
        Counting.passes += samples.count * directions.count
        return super().probe(values, samples, directions, stats)

    def differences(self, *order: Any) -> tuple[array[float], float]:
        found = in_parts.differences(self, *order)
        assert found == super().differences(*order)
        return found

    def batch_stats(self, values: Any, samples: Samples) -> array[float]:
        Counting.passes += samples.count
        return super().batch_stats(values, samples)


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize(("spread", "k"), [(1, 6), (2, 6), (4, 6), (5, 7), (40, 40)])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_forward_passes_are_counted_as_run(
    world: World, monkeypatch: pytest.MonkeyPatch, difference: str, spread: int, k: int, local_steps: int
) -> None:
    there = world.changed(
        train__difference=difference, train__spread=spread, train__k=k, train__local_steps=local_steps
    )
    monkeypatch.setattr(workers_module, "Engine", Counting)
    monkeypatch.setattr(Counting, "passes", 0)
    with there.devices() as devices:
        row = ntk_baffle.round(there.task, devices, ntk_baffle.init(there.task))
    assert row.work.forward_passes == Counting.passes
    assert row.work.flops == Counting.passes * 2 * world.task.program.macs
    assert row.work.dense_flops == Counting.passes * 2 * world.task.program.dense_macs
    if spread == 1:
        each = 2 * k if difference == "central" else k + 1
        assert Counting.passes == row.samples * each * local_steps


def test_the_pass_that_makes_batch_norm_statistics_is_counted(
    norm_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "Engine", Counting)
    monkeypatch.setattr(Counting, "passes", 0)
    with norm_world.devices() as devices:
        row = ntk_baffle.round(norm_world.task, devices, ntk_baffle.init(norm_world.task))
    assert row.work.forward_passes == Counting.passes == row.samples * (6 + 1 + 1)


@pytest.mark.parametrize("engine", ["difference", "exact"])
def test_bytes_are_those_of_the_encoded_messages(world: World, engine: str) -> None:
    there = world.changed(engine=engine)
    state = ntk_baffle.init(there.task)
    program, values = there.task.program.bytes, 4 * there.task.program.n_live
    with there.devices() as devices:
        for round in range(3):
            coordinator = state.coordinator
            held = coordinator.state.last_seen.copy()
            orders = coordinator.open()
            replies = devices.replies(orders, there.task.program, coordinator.state.values)
            up, down = sum(len(encode(reply)) for reply in replies), sum(len(encode(order)) for order in orders)
            for order in orders:
                if held[order.device] == NOTHING_HELD:
                    up, down = up + fetching(PROGRAM, 0, len(program))[0], down + fetching(PROGRAM, 0, len(program))[1]
                if held[order.device] != round and not order.updates:
                    size = values * (1 + coordinator.vectors)
                    up, down = up + fetching(STATE, round, size)[0], down + fetching(STATE, round, size)[1]
            row = ntk_baffle.round(there.task, devices, state)
            assert row.traffic[:2] == (up, down)
            assert row.participants == [order.device for order in orders]


def fetching(what: int, round: int, size: int) -> tuple[int, int]:
    """Bytes up and down of a download, message by message."""
    run, cuts = bytes(8), range(0, size, CHUNK)
    down = [encode(Chunk(run, what, round, at, bytes(min(CHUNK, size - at)))) for at in cuts]
    return sum(len(encode(Fetch(run, what, round, at))) for at in cuts), sum(map(len, down))


def test_a_run_of_a_real_fleet_can_be_gone_through_again(world: World) -> None:
    taken = [[0, 3], [5], [1, 2, 4]]
    devices, state = SimulatedDevices(*world, participants=taken), ntk_baffle.init(world.task)
    try:
        assert [ntk_baffle.round(world.task, devices, state).participants for _ in taken] == taken
    finally:
        devices.close()


# --- batch norms ---


def test_batch_norm_statistics_are_the_devices_own_and_are_averaged(norm_world: World) -> None:
    coordinator, replies = norm_world.ask()
    engine = Engine(norm_world.task.program, batch=norm_world.config.train.batch)
    for reply in replies:
        own = engine.batch_stats(coordinator.state.values, norm_world.population.samples(reply.device))
        assert reply.stats == own.tobytes()
        assert len(own) == norm_world.task.program.n_stats == 8
        coordinator.receive(reply)
    learn(coordinator)
    weights = [reply.samples for reply in replies]
    expected = np.average([np.frombuffer(reply.stats, np.float32) for reply in replies], axis=0, weights=weights)
    np.testing.assert_allclose(coordinator.state.stats, expected, rtol=1e-5)


def test_batch_norms_are_frozen_while_a_device_probes(norm_world: World) -> None:
    coordinator, (reply, *_) = norm_world.ask()
    engine, samples = Engine(norm_world.task.program), norm_world.population.samples(reply.device)
    stats = np.frombuffer(reply.stats, np.float32)
    base = engine.loss(coordinator.state.values, samples, stats)[0]
    assert reply.base_loss == np.float32(base / samples.count)
    d = Directions(norm_world.config.seed, 1, reply.device, count=6)
    losses = engine.probe(coordinator.state.values, samples, d, stats)
    np.testing.assert_array_equal(found(reply), np.float32((np.array(losses) - base) / samples.count))


# --- evaluation ---


@pytest.mark.parametrize("name", ["world", "norm_world"])
@pytest.mark.parametrize("workers", [1, 3])
def test_evaluation_is_torchs(
    name: str, workers: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: World = request.getfixturevalue(name).changed(workers=workers)
    monkeypatch.setattr(workers_module, "_TEST_CHUNK", 7)  # chunks of different sizes, for several threads
    stats = np.random.default_rng(0).uniform(0.5, 1.5, there.task.program.n_stats).astype(np.float32)
    with there.devices() as devices:
        accuracy, loss = devices.evaluate(there.task.program, there.task.values, stats)
    model = there.task.model.eval()
    models.restore(model, there.task.program, there.task.values, stats if stats.size else None)
    images, numbers = there.task.test[:, 1:].reshape(-1, *there.task.program.input_shape), there.task.test[:, 0]
    pixels = torch.from_numpy(images.astype(np.float32))
    scale, shift = (torch.tensor(x).view(-1, 1, 1) for x in (there.task.program.scale, there.task.program.shift))
    labels = torch.from_numpy(numbers.astype(np.int64))
    with torch.no_grad():
        logits = model(pixels * scale + shift)
    assert loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert accuracy == pytest.approx(float((logits.argmax(1) == labels).float().mean()), abs=1e-6)


def test_all_devices_images_are_there_once(world: World) -> None:
    data = load(world.config.data.set)
    together = np.concatenate([world.population.images(device)[0] for device in range(6)])
    assert sorted(map(bytes, together)) == sorted(map(bytes, data.train_images))
    for device in range(6):
        images, labels = world.population.images(device)
        np.testing.assert_array_equal(images, data.train_images[world.population.partition.indices[device]])
        np.testing.assert_array_equal(labels, data.train_labels[world.population.partition.indices[device]])
        assert world.population.samples(device).count == len(images)


def test_order_is_followed_as_it_says_whatever_the_fleets_own_config(world: World) -> None:
    coordinator = ntk_baffle.init(world.task).coordinator
    order = coordinator.open()[0]._replace(k=3, sigma=1e-2, rademacher=True, shared=True, central=True)
    with world.devices() as devices:
        (reply,) = devices.replies([order], world.task.program, coordinator.state.values)
    engine, samples = Engine(world.task.program), world.population.samples(order.device)
    there, back = (
        np.array(
            engine.probe(
                coordinator.state.values,
                samples,
                Directions(world.config.seed, 1, SHARED_DEVICE, count=3, kind="rademacher", sigma=sigma),
            )
        )
        for sigma in (1e-2, -1e-2)
    )
    np.testing.assert_array_equal(found(reply), np.float32((there - back) / 2 / samples.count))

"""A device's answer, against losses computed one by one through the engine."""

from __future__ import annotations

import subprocess
import sys
from array import array
from random import Random

import pytest

from foreseed.device import Order, OrderError, answer
from foreseed.engine import SHARED_DEVICE, Directions, Engine, ForeseedError, Samples, accumulate, native, perturb, sgd
from foreseed.engine.blocks import Block
from foreseed.engine.program import Act, Kind, Op, Program, assemble

SIGMA = 0.01


def _program(norm_groups: int = 1) -> Program:
    ops = [
        Op(Kind.CONV, 0, flags=1, channels=4, groups=1, window=(3, 3, 1, 1, 1, 1)),
        Op(Kind.NORM, 1, flags=1, groups=norm_groups, act=Act.RELU, eps=1e-5),
        Op(Kind.CONV, 2, flags=1, channels=3, groups=1, window=(4, 4, 1, 1, 0, 0)),
    ]
    return assemble((2, 4, 4), 3, [0.01, 0.01], [-1.0, -1.0], ops, [list(range(0, 72, 3)), None, None])


def _values(program: Program) -> array[float]:
    random = Random(1)
    return array("f", [random.gauss(0, 0.5) for _ in range(program.n_live)])


def _samples(count: int) -> Samples:
    random = Random(2)
    records = b"".join(bytes([random.randrange(3), *random.randbytes(32)]) for _ in range(count))
    return Samples.records(records, 32)


PROGRAM = _program()
VALUES = _values(PROGRAM)
ENGINE = Engine(PROGRAM, batch=4)


def _mean_loss(order: Order, k: int, samples: Samples, sign: int = 1, values: array[float] = VALUES) -> float:
    device = SHARED_DEVICE if order.shared else order.device
    directions = Directions(order.seed, order.round, device, 1, k, 1, order.kind, sign * order.sigma)
    return ENGINE.loss(perturb(values, directions, k), samples)[0] / samples.count


def _mean_base(samples: Samples) -> float:
    return ENGINE.loss(VALUES, samples)[0] / samples.count


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_forward_differences_are_losses_along_the_directions_minus_the_base_loss(kind: str) -> None:
    samples = _samples(7)
    order = Order(5, 3, 9, k=6, sigma=SIGMA, kind=kind)
    found = answer(ENGINE, VALUES, samples, order)
    expected = [_mean_loss(order, k, samples) - _mean_base(samples) for k in range(6)]
    assert list(found.loss_differences) == pytest.approx(expected, abs=1e-7)
    assert found.base_loss == pytest.approx(_mean_base(samples))
    assert found.samples == 7


def test_spread_probes_direction_k_on_part_k_mod_spread_against_that_parts_own_base_loss() -> None:
    samples = _samples(7)
    parts = [samples.part(0, 2), samples.part(2, 2), samples.part(4, 3)]
    order = Order(5, 3, 9, k=8, sigma=SIGMA, spread=3)
    found = answer(ENGINE, VALUES, samples, order)
    expected = [_mean_loss(order, k, parts[k % 3]) - _mean_base(parts[k % 3]) for k in range(8)]
    assert list(found.loss_differences) == pytest.approx(expected, abs=1e-7)
    assert found.base_loss == pytest.approx(_mean_base(samples))


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_directions_of_a_block_perturb_its_values_alone(central: bool, kept: bool) -> None:
    first = PROGRAM.layers()[0].n_values + PROGRAM.layers()[1].n_values
    samples, engine = _samples(7), Engine(PROGRAM, batch=4, keep=[first] if kept else [])
    blocks = (Block(first, 3, 1), Block(PROGRAM.n_live - first, 4, 2))
    found = answer(engine, VALUES, samples, Order(5, 3, 9, k=7, sigma=SIGMA, central=central, blocks=blocks))

    def loss(k: int, where: Samples, sigma: float) -> float:
        at, size = (0, first) if k < 3 else (first, PROGRAM.n_live - first)
        moved = array("f", VALUES)
        moved[at : at + size] = perturb(VALUES[at : at + size], Directions(5, 3, 9, 1, k, sigma=sigma), k)
        return ENGINE.loss(moved, where)[0] / where.count

    parts = [samples] * 3 + [samples.part(0, 3), samples.part(3, 4)] * 2
    for k, (there, difference) in enumerate(zip(parts, found.loss_differences, strict=True)):
        back = loss(k, there, -SIGMA) if central else _mean_base(there)
        assert difference == pytest.approx((loss(k, there, SIGMA) - back) / (1 + central), abs=1e-7)
    assert found.base_loss == pytest.approx(_mean_base(samples), abs=SIGMA)


@pytest.mark.parametrize("spread", [1, 2])
def test_central_differences_are_half_of_what_the_two_sides_differ_by(spread: int) -> None:
    samples = _samples(6)
    parts = [samples] if spread == 1 else [samples.part(0, 3), samples.part(3, 3)]
    order = Order(5, 3, 9, k=5, sigma=SIGMA, spread=spread, central=True)
    found = answer(ENGINE, VALUES, samples, order)
    sides = [(_mean_loss(order, k, parts[k % spread]), _mean_loss(order, k, parts[k % spread], -1)) for k in range(5)]
    assert list(found.loss_differences) == pytest.approx([(there - back) / 2 for there, back in sides], abs=1e-7)
    middles = [[sum(sides[k]) / 2 for k in range(part, 5, spread)] for part in range(spread)]
    assert found.base_loss == pytest.approx(sum(sum(m) / len(m) for m in middles) / spread)


def test_shared_directions_are_the_same_for_every_device_and_others_are_not() -> None:
    samples = _samples(4)

    def differences(device: int, shared: bool) -> list[float]:
        order = Order(5, 3, device, k=4, sigma=SIGMA, shared=shared)
        return list(answer(ENGINE, VALUES, samples, order).loss_differences)

    assert differences(1, shared=True) == differences(2, shared=True)
    assert differences(1, shared=False) != differences(2, shared=False)
    order = Order(5, 3, 1, k=4, sigma=SIGMA, shared=True)
    expected = [_mean_loss(order, k, samples) - _mean_base(samples) for k in range(4)]
    assert differences(1, shared=True) == pytest.approx(expected, abs=1e-7)


def test_fewer_samples_than_parts_make_a_part_of_each_sample() -> None:
    samples = _samples(2)
    order = Order(5, 3, 9, k=6, sigma=SIGMA, spread=5)
    found = answer(ENGINE, VALUES, samples, order)
    ones = [samples.part(0, 1), samples.part(1, 1)]
    expected = [_mean_loss(order, k, ones[k % 2]) - _mean_base(ones[k % 2]) for k in range(6)]
    assert list(found.loss_differences) == pytest.approx(expected, abs=1e-7)


def test_answer_has_the_same_bits_for_any_batch_and_any_number_of_directions_side_by_side() -> None:
    samples, order = _samples(9), Order(5, 3, 9, k=7, sigma=SIGMA, spread=2)
    engines = [Engine(PROGRAM, batch=1), Engine(PROGRAM, batch=32, directions=4)]
    first, second = (answer(engine, VALUES, samples, order) for engine in engines)
    assert first.loss_differences.tobytes() == second.loss_differences.tobytes()
    assert first.base_loss == second.base_loss


def test_samples_are_released_part_by_part() -> None:
    released: list[tuple[int, int]] = []
    order = Order(5, 3, 9, k=3, spread=3)
    answer(ENGINE, VALUES, _samples(7), order, release=lambda first, count: released.append((first, count)))
    assert released == [(0, 2), (2, 2), (4, 3)]


@pytest.mark.parametrize("central", [False, True])
def test_long_parts_are_probed_and_released_block_by_block(monkeypatch: pytest.MonkeyPatch, central: bool) -> None:
    order, samples, released = Order(5, 3, 9, k=4, sigma=SIGMA, spread=2, central=central), _samples(17), []
    whole = answer(ENGINE, VALUES, samples, order)
    monkeypatch.setattr(native, "BLOCK", 3)
    found = answer(ENGINE, VALUES, samples, order, release=lambda first, count: released.append((first, count)))
    assert released == [(0, 3), (3, 3), (6, 2), (8, 3), (11, 3), (14, 3)]
    assert found.base_loss == pytest.approx(whole.base_loss, rel=1e-12)
    assert list(found.loss_differences) == pytest.approx(list(whole.loss_differences), rel=1e-6, abs=1e-12)


def test_local_steps_probe_new_directions_from_values_that_have_moved() -> None:
    samples = _samples(5)
    order = Order(5, 3, 9, k=4, sigma=SIGMA, local_steps=2, local_lr=0.1)
    found = answer(ENGINE, VALUES, samples, order)
    first = answer(ENGINE, VALUES, samples, Order(5, 3, 9, k=4, sigma=SIGMA))
    assert found.loss_differences[:4] == first.loss_differences
    assert found.base_loss == first.base_loss

    gradient = array("f", bytes(4 * len(VALUES)))
    coefficients = array("f", [difference / (4 * SIGMA) for difference in first.loss_differences])
    accumulate(gradient, Directions(5, 3, 9, 4, sigma=SIGMA), coefficients)
    moved = array("f", VALUES)
    sgd(moved, None, gradient, 0.1, 0.0, 0.0)
    base = ENGINE.loss(moved, samples)[0] / samples.count
    expected = [_mean_loss(order, k, samples, values=moved) - base for k in range(4, 8)]
    assert list(found.loss_differences[4:]) == pytest.approx(expected, abs=1e-7)


def test_frozen_statistics_reach_every_pass() -> None:
    program = _program(norm_groups=0)
    engine, values, samples = Engine(program, batch=4), _values(program), _samples(8)
    stats = array("f", [0.1] * 4 + [2.0] * 4)
    found = answer(engine, values, samples, Order(5, 3, 9, k=3, sigma=SIGMA), stats)
    base = engine.loss(values, samples, stats)[0]
    losses = engine.probe(values, samples, Directions(5, 3, 9, 3, sigma=SIGMA), stats)
    assert list(found.loss_differences) == pytest.approx([(loss - base) / 8 for loss in losses], abs=1e-7)


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"round": 2**32}, "round 4294967296"),
        ({"device": SHARED_DEVICE}, "device 4294967295"),
        ({"k": 0}, "k 0"),
        ({"k": 2.5}, "k 2.5"),
        ({"k": True}, "k True"),
        ({"spread": 5}, "spread 5 with k 4"),
        ({"sigma": 0.0}, "sigma 0.0"),
        ({"sigma": 1e-60}, "sigma 1e-60"),
        ({"sigma": float("nan")}, "sigma nan"),
        ({"sigma": "small"}, "sigma 'small'"),
        ({"kind": "uniform"}, "kind 'uniform'"),
        ({"local_steps": 0}, "local_steps 0"),
        ({"local_lr": -1.0}, "local_lr -1.0"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused_with_what_was_given(wrong: dict[str, object], given: str) -> None:
    with pytest.raises(OrderError, match=f"order: {given}") as caught:
        Order(**{"seed": 1, "round": 1, "device": 1, "k": 4, **wrong})
    assert isinstance(caught.value, ForeseedError)


def test_a_device_imports_neither_numpy_nor_torch() -> None:
    script = "import sys, foreseed.device; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert "foreseed.device.probing" in modules
    assert not {"numpy", "torch"} & set(modules)

"""`foreseed.meter.flops`: work as a device really does it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.device import Order, answer
from foreseed.engine.in_parts import differences
from foreseed.engine.program import Kind, Op, Program, assemble
from foreseed.engine.types import Buffer, Directions, Samples
from foreseed.meter import Work, bp_free_work, bp_work, dense_forward_flops, forward_flops


def program(live: list[int] | None) -> Program:
    """A 2x2 conv over 3x3 images (four places) to two channels, then a dense linear layer to two classes."""
    conv = Op(Kind.CONV, 0, channels=2, groups=1, window=(2, 2, 1, 1, 0, 0))
    linear = Op(Kind.CONV, 1, flags=1, channels=2, groups=1, window=(2, 2, 1, 1, 0, 0))
    return assemble((1, 3, 3), 2, [1.0], [0.0], [conv, linear], [live, None])


PROGRAM = program([0, 3, 5])
LIVE = 2 * (3 * 4 + 16)
DENSE = 2 * (8 * 4 + 16)


class CountingEngine:
    """Counts the images that pass through it."""

    forward_passes = 0
    differences = differences

    def loss(self, values: Buffer, samples: Samples, stats: Buffer | None = None) -> tuple[float, int]:
        self.forward_passes += samples.count
        return 0.0, 0

    def probe(
        self, values: Buffer, samples: Samples, directions: Directions, stats: Buffer | None = None
    ) -> array[float]:
        self.forward_passes += samples.count * directions.count
        return array("d", bytes(8 * directions.count))


def test_a_forward_pass_is_two_flops_for_each_live_weight_and_place() -> None:
    assert forward_flops(PROGRAM) == LIVE
    assert dense_forward_flops(PROGRAM) == DENSE
    assert forward_flops(program(None)) == dense_forward_flops(program(None)) == DENSE


@given(
    samples=st.integers(1, 40),
    k=st.integers(1, 30),
    spread=st.integers(1, 30),
    central=st.booleans(),
    local_steps=st.integers(1, 3),
)
def test_bp_free_work_is_what_a_device_does(samples: int, k: int, spread: int, central: bool, local_steps: int) -> None:
    spread, engine = min(spread, k), CountingEngine()
    order = Order(seed=0, round=1, device=0, k=k, spread=spread, central=central, local_steps=local_steps)
    values = array("f", [0.5] * PROGRAM.n_live)
    answer(engine, values, Samples.records(bytes(10 * samples), 9), order)  # type: ignore[arg-type]
    work = bp_free_work(PROGRAM, samples, k, spread, central, local_steps)
    assert work == Work(engine.forward_passes, engine.forward_passes * LIVE, engine.forward_passes * DENSE)


@pytest.mark.parametrize(
    ("k", "spread", "central", "local_steps", "passes"),
    [
        (50, 1, False, 1, 51 * 100),
        (50, 1, True, 1, 100 * 100),
        (50, 10, False, 1, 5 * 100 + 100),
        (50, 10, True, 1, 2 * 5 * 100),
        (50, 10, False, 3, 3 * (5 * 100 + 100)),
    ],
)
def test_bp_free_work_where_all_divides(k: int, spread: int, central: bool, local_steps: int, passes: int) -> None:
    assert bp_free_work(PROGRAM, 100, k, spread, central, local_steps).forward_passes == passes


def test_uneven_parts_are_counted_as_they_are() -> None:
    # Seven images in parts of 2, 2 and 3; four directions, of which the first part gets two.
    assert bp_free_work(PROGRAM, 7, 4, 3, central=False, local_steps=1).forward_passes == 7 + 2 * 2 + 2 + 3


def test_backpropagation_is_three_forwards_an_image_and_epoch() -> None:
    assert bp_work(PROGRAM, samples=20, epochs=5) == Work(300, 300 * LIVE, 300 * DENSE)


def test_work_of_several_devices_adds_up() -> None:
    devices = [bp_work(PROGRAM, 3, 1), bp_free_work(PROGRAM, 5, 2, 1, False, 1)]
    assert sum(devices, Work()) == Work(24, 24 * LIVE, 24 * DENSE)

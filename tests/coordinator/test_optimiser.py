"""The optimiser's constants, as the update log carries them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from foreseed.coordinator import Optimiser
from foreseed.engine import ForeseedError


def constants(optimiser: Optimiser, round: int) -> list[float]:
    return list(array("f", optimiser.step(round)))


def test_learning_rate_decays_from_the_second_round_on() -> None:
    optimiser = Optimiser(lr=0.1, lr_decay=0.5)
    assert [optimiser.lr_at(round) for round in (1, 2, 3)] == [0.1, 0.05, 0.025]
    assert constants(optimiser, 3)[0] == pytest.approx(0.025)


def test_learning_rate_climbs_in_the_first_rounds_and_falls_as_half_a_cosine() -> None:
    optimiser = Optimiser(lr=0.1, lr_decay=0.5, warmup=4, cosine=6)
    falling = [1, (1 + 3**0.5 / 2) / 2, 0.75, 0.5, 0.25, (1 - 3**0.5 / 2) / 2, 0, 0]
    expected = [
        0.1 * climbed * fallen for climbed, fallen in zip([0.25, 0.5, 0.75, 1, 1, 1, 1, 1], falling, strict=True)
    ]
    assert [optimiser.lr_at(round) for round in range(1, 9)] == pytest.approx(expected)
    assert [optimiser.constant.lr_at(round) for round in (1, 5, 9)] == [0.1, 0.1, 0.1]


def test_sgd_is_told_as_lr_momentum_and_decay() -> None:
    assert constants(Optimiser("sgd", 0.1, 0.9, 0.01), 1) == pytest.approx([0.1, 0.9, 0.01])


@pytest.mark.parametrize("round", [1, 2, 1000, 10**7])
def test_adam_is_told_with_the_bias_corrections_of_its_round(round: int) -> None:
    expected = [0.1, 0.9, 0.99, 1e-8, 0.01, 1 / (1 - 0.9**round), 1 / (1 - 0.99**round)]
    assert constants(Optimiser("adam", 0.1, weight_decay=0.01), round) == pytest.approx(expected)


def test_optimiser_keeps_only_the_vectors_that_it_uses() -> None:
    assert Optimiser("sgd", momentum=0.9).n_buffers == 1
    assert Optimiser("sgd", momentum=0.0).n_buffers == 0
    assert Optimiser("adam", momentum=0.0).n_buffers == 2


def test_unknown_optimiser_is_refused() -> None:
    unknown: Any = "adamw"
    with pytest.raises(ForeseedError, match="optimiser 'adamw': expected 'sgd' or 'adam'"):
        Optimiser(unknown)

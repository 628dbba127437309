"""What a run says of itself: a loss that grows and grows, once, with the knob to turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foreseed.runs import Row
from foreseed.runs.loop import diverging


def rows(losses: Sequence[float | None]) -> list[Row]:
    return [
        Row(
            round=i, lr=0.1, train_loss=1.0, devices=1, samples=1, forward_passes=1, flops=1, dense_flops=1,
            participants=(0,), bytes_up=1, bytes_down=1, seconds=0.0, accuracy=None if loss is None else 0.5, loss=loss,
            ema_accuracy=None, ema_loss=None,
        )
        for i, loss in enumerate(losses, 1)
    ]  # fmt: skip


def said(losses: Sequence[float | None]) -> list[tuple[int, str]]:
    """Every word on the way, with its round."""
    every = rows(losses)
    return [
        (n, note) for n in range(1, len(every) + 1) if every[n - 1].loss is not None and (note := diverging(every[:n]))
    ]


def test_a_loss_that_grows_and_grows_is_told_once_with_the_knob_to_turn() -> None:
    [(round, note)] = said([2.0, None, 0.5, 0.55, None, 0.6, 0.7, 0.9, 1.3, 2.0])
    assert round == 7
    assert note.startswith("the test loss has grown from 0.500 (round 3) to 0.700:")
    assert "train.lr" in note


@pytest.mark.parametrize(
    "losses",
    [
        [2.3, 1.5, 1.0, 0.8, 0.7, 0.6],
        [2.3, 0.5, 0.9, 0.5, 0.9, 0.5, 0.9],
        [2.3, 0.5, 0.52, 0.54, 0.56, 0.58],
        [2.3, 0.5],
        [],
    ],
    ids=["falls", "swings", "grows a little", "too early", "nothing yet"],
)
def test_other_losses_are_nothing_to_speak_of(losses: list[float]) -> None:
    assert said(losses) == []

"""A device's answer by single probes: what `fs_answer` in C comes to, for engines that have no such call."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from foreseed.engine.types import BLOCK, Buffer, Directions, Samples, split


class Probing(Protocol):
    """An engine's single probes."""

    def loss(self, values: Buffer, samples: Samples, stats: Buffer | None = None, /) -> tuple[float, int]: ...

    def probe(
        self, values: Buffer, samples: Samples, directions: Directions, stats: Buffer | None = None, /
    ) -> array[float]: ...


def differences(
    engine: Probing,
    values: Buffer,
    samples: Samples,
    directions: Directions,
    spread: int = 1,
    central: bool = False,
    stats: Buffer | None = None,
    release: Callable[[int, int], None] | None = None,
) -> tuple[array[float], float]:
    """How the mean loss changes along each direction, on its part of the samples, and the mean loss itself."""
    spans = split(samples.count, spread)
    parts = len(spans)
    found, base_loss = array("f", bytes(4 * directions.count)), 0.0
    for part, (first, count) in enumerate(spans):
        forward = _every(parts, directions, part, directions.sigma)
        backward = _every(parts, directions, part, -directions.sigma)
        losses, opposite, base = [0.0] * forward.count, [0.0] * forward.count, 0.0
        for at in range(first, first + count, BLOCK):
            size = min(BLOCK, first + count - at)
            here = samples.part(at, size)
            losses = _add(losses, engine.probe(values, here, forward, stats))
            if central:
                opposite = _add(opposite, engine.probe(values, here, backward, stats))
            else:
                base += engine.loss(values, here, stats)[0]
            if release is not None:
                release(at, size)
        if central:
            changes = [(there - back) / 2 for there, back in zip(losses, opposite, strict=True)]
            base = _mean(losses, opposite)
        else:
            changes = [loss - base for loss in losses]
        found[part::parts] = array("f", [change / count for change in changes])
        base_loss += base
    return found, base_loss / samples.count


def _every(parts: int, d: Directions, part: int, sigma: float) -> Directions:
    """Those of the directions that are probed on one part."""
    count = len(range(part, d.count, parts))
    return Directions(d.seed, d.round, d.device, count, d.first + part, parts, d.kind, sigma, d.at, d.size)


def _add(sums: list[float], more: array[float]) -> list[float]:
    return [total + loss for total, loss in zip(sums, more, strict=True)]


def _mean(losses: list[float], opposite: list[float]) -> float:
    # Added one by one: the built-in sum rounds differently from one Python version to the next.
    total = 0.0
    for there, back in zip(losses, opposite, strict=True):
        total += there + back
    return total / (2 * len(losses))

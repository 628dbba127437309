"""How many weights each layer keeps, so that all of them together keep exactly as many as were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from foreseed.config import ConfigError


class Sized(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...


def share_out(layers: Sequence[Sized], odds: Sequence[float], total: int) -> list[int]:
    """`total` weights over the layers, whose densities are as the odds to each other; a layer that is full stays so.

    A layer that would get none is refused: nothing would pass.
    """
    sizes, wanted = np.array([layer.size for layer in layers]), np.array(odds, np.float64)
    full = np.zeros(len(sizes), bool)
    while True:
        density = np.where(full, 1.0, wanted * (total - sizes[full].sum()) / max(wanted @ (sizes * ~full), 1e-300))
        if not (density > 1).any():
            break
        full |= density > 1
    exact = density * sizes
    # Half a billionth more, so that what is whole but for rounding stays whole.
    counts = np.floor(exact + 5e-10).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    for layer, count in zip(layers, counts, strict=True):
        if not count:
            raise ConfigError(
                f"{total} of {sizes.sum()} weights leave none for {layer.name} ({layer.size}), so nothing would pass; "
                "raise prune.density"
            )
    return [int(count) for count in counts]

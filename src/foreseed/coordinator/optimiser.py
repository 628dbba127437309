"""The server's optimiser: its constants for each round, as the update log carries them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from math import cos, pi
from typing import Literal

from foreseed.engine.errors import ForeseedError


@dataclass(frozen=True)
class Optimiser:
    """SGD with momentum, or Adam, on the aggregated gradient estimate; the learning rate follows a schedule."""

    kind: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    warmup: int = 0
    """Rounds in which the learning rate climbs."""
    cosine: int = 0
    """Rounds in which it falls to 0 as half a wave does; 0: it decays by `lr_decay`."""
    nesterov: bool = False
    restarts: bool = False
    """The momentum starts anew in rounds whose estimate points against it."""
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.kind not in ("sgd", "adam"):
            raise ForeseedError(
                f"optimiser {self.kind!r}: expected 'sgd' or 'adam'; set train.optimiser to one of them"
            )

    @property
    def n_buffers(self) -> int:
        """Vectors that the optimiser keeps beside the values."""
        return 2 if self.kind == "adam" else int(self.momentum > 0)

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (rounds count from 1)."""
        climbed = min(1.0, round / self.warmup) if self.warmup else 1.0
        if self.cosine:
            return self.lr * climbed * (1 + cos(pi * min(1.0, (round - 1) / self.cosine))) / 2
        return self.lr * climbed * self.lr_decay ** (round - 1)

    @property
    def constant(self) -> Optimiser:
        """The same with one learning rate for every round."""
        return replace(self, lr_decay=1.0, warmup=0, cosine=0)

    def step(self, round: int, share: float = 1.0, restart: bool = False) -> bytes:
        """The round's constants as float32, with a share of its rate: all that a replaying device needs to know."""
        lr = share * self.lr_at(round)
        if self.kind == "sgd":
            return array("f", (lr, 0.0 if restart else self.momentum, self.weight_decay)).tobytes()
        k1, k2 = 1 / (1 - self.beta1**round), 1 / (1 - self.beta2**round)
        return array("f", (lr, self.beta1, self.beta2, self.eps, self.weight_decay, k1, k2)).tobytes()

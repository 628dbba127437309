"""A device's answer to one round's order: how the loss changes along random directions.

Plain classes and no `typing` at run time: importing `dataclasses` or `typing` would cost a device 2.5 and 1.4 MB.
"""

from __future__ import annotations

from array import array

from foreseed.engine.blocks import probed, spans
from foreseed.engine.errors import ForeseedError
from foreseed.engine.types import SHARED_DEVICE, Directions, Samples

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from foreseed.engine import Engine
    from foreseed.engine.blocks import Block, Span
    from foreseed.engine.types import Buffer, DirectionKind
    from foreseed.wire import OrderMessage

_KINDS: tuple[DirectionKind, DirectionKind] = ("gaussian", "rademacher")
_SMALLEST_FLOAT32, _LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


class OrderError(ForeseedError):
    """An order that no device can follow."""


class Order:
    """What a device is asked in one round: the change of its loss along `k` directions, `sigma` far."""

    __slots__ = (
        "central", "device", "k", "kind", "local_lr", "local_steps", "round", "seed", "shared", "sigma", "spans"
    )  # fmt: skip

    def __init__(
        self,
        seed: int,
        round: int,
        device: int,
        k: int,
        sigma: float = 1e-4,
        kind: DirectionKind = "gaussian",
        shared: bool = False,
        spread: int = 1,
        central: bool = False,
        local_steps: int = 1,
        local_lr: float = 0.01,
        blocks: tuple[Block, ...] = (),
    ) -> None:
        """Check every number, so that an order that exists can be followed.

        `shared`: all devices get the same directions. `spread`: direction k is probed on part k mod spread of the
        images only. `central`: the loss is taken on both sides, at twice the passes and without a pass at the middle.
        `local_steps`: how often the device probes k new directions, moving its own copy of the values by `local_lr`
        times its estimate in between; the server can replay that from the differences. `blocks`: groups of layers,
        each with directions and a spread of its own; `k` is then the sum of theirs.
        """
        self.seed = _checked_int("seed", seed, 0, 2**64 - 1)
        self.round = _checked_int("round", round, 0, 2**32 - 1)
        self.device = _checked_int("device", device, 0, SHARED_DEVICE - 1)
        self.k = _checked_int("k", k, 1, 2**32 - 1)
        if blocks and (k, spread) != (sum(block.k for block in blocks), 1):
            raise OrderError(f"order: k {k} and spread {spread} with blocks: expected the sum of theirs, and 1")
        if blocks and local_steps != 1:
            raise OrderError(f"order: {local_steps} local steps with blocks: expected 1")
        self.spans = spans(probed(blocks, k, spread))
        for span in self.spans:
            _checked_int("spread", span.spread, 1, 2**32 - 1)
            if span.spread > span.k:
                raise OrderError(
                    f"order: spread {span.spread} with k {span.k}: each part needs a direction; lower spread or raise k"
                )
        # Directions are float32: a sigma that rounds to 0 there would answer 0 whatever the loss does.
        if not isinstance(sigma, int | float) or not _SMALLEST_FLOAT32 <= sigma <= _LARGEST_FLOAT32:
            raise OrderError(f"order: sigma {sigma!r} given, expected a positive float32 number such as 1e-4")
        self.sigma = float(sigma)
        if kind not in _KINDS:
            raise OrderError(f"order: kind {kind!r} given, expected {' or '.join(_KINDS)}")
        self.kind: DirectionKind = kind
        self.shared, self.central = bool(shared), bool(central)
        self.local_steps = _checked_int("local_steps", local_steps, 1, 2**12)
        if not isinstance(local_lr, int | float) or not 0 < local_lr <= _LARGEST_FLOAT32:
            raise OrderError(f"order: local_lr {local_lr!r} given, expected a positive number such as 0.01")
        self.local_lr = float(local_lr)

    @staticmethod
    def of(message: OrderMessage) -> Order:
        """The order in a message."""
        return Order(
            message.seed, message.round, message.device, message.k, message.sigma, _KINDS[message.rademacher],
            message.shared, message.spread, message.central, message.local_steps, message.local_lr, message.blocks,
        )  # fmt: skip

    def directions(self, span: Span, part: int = 0, parts: int = 1, step: int = 0) -> Directions:
        """A block's directions in a local step that are probed on one part of the images; all, if there is one."""
        count = len(range(part, span.k, parts))
        device = SHARED_DEVICE if self.shared else self.device
        first = step * self.k + span.first + part
        return Directions(self.seed, self.round, device, count, first, parts, self.kind, self.sigma, span.at, span.size)


class Answer:
    """What a device found out, per direction and on the whole."""

    __slots__ = ("base_loss", "loss_differences", "samples")

    def __init__(self, loss_differences: array[float], base_loss: float, samples: int) -> None:
        self.loss_differences = loss_differences
        """For each direction (of each local step) the mean loss along it minus the mean loss at the values, over its
        part of the images; for central differences half of what the two sides differ by: both are used alike."""
        self.base_loss = base_loss
        """The mean loss at the values (of the first step); for central differences the middle of the two sides."""
        self.samples = samples


def answer(
    engine: Engine,
    values: Buffer,
    samples: Samples,
    order: Order,
    stats: Buffer | None = None,
    release: Callable[[int, int], None] | None = None,
) -> Answer:
    """Follow an order: probe its directions on these samples.

    The samples are cut into `spread` parts of consecutive ones (a part a sample, where there are fewer), anew for
    every block of the order.
    `stats` are frozen statistics for batch norms. `release(first, count)` is told of samples that have been used up;
    give it a shard's own `release`, and only BLOCK samples of the shard count as memory at a time.
    """

    def found(where: Buffer, step: int) -> tuple[array[float], float]:
        differences, base_loss = array("f"), 0.0
        for span in order.spans:
            directions = order.directions(span, step=step)
            some, loss = engine.differences(where, samples, directions, span.spread, order.central, stats, release)
            base_loss = base_loss if differences else loss
            differences += some
        return differences, base_loss

    differences, base_loss = found(values, 0)
    local = array("f")
    for step in range(1, order.local_steps):
        local = local or array("f", bytes(memoryview(values).cast("B")))
        move(local, differences[-order.k :], order, step - 1)
        differences += found(local, step)[0]
    return Answer(differences, base_loss, samples.count)


def move(local: array[float], differences: array[float], order: Order, step: int) -> None:
    """One step of the device's own: along the estimate of its last k differences."""
    from foreseed.engine import accumulate, sgd

    coefficients = array("f", [difference / (order.k * order.sigma) for difference in differences])
    gradient = array("f", bytes(4 * len(local)))
    accumulate(gradient, order.directions(order.spans[0], step=step), coefficients)
    sgd(local, None, gradient, order.local_lr, 0.0, 0.0)


def _checked_int(name: str, given: int, low: int, high: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
        raise OrderError(f"order: {name} {given!r} given, expected a whole number from {low} to {high}")
    return given

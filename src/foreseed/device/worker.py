"""What answers a device's orders: an engine that fits its memory, and its own images. A device loads this module."""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from math import isfinite

from foreseed.device.probing import Order, answer
from foreseed.device.shard import open_shard, stamp_of
from foreseed.engine import BudgetError, Engine, ForeseedError, ProgramHead, SamplesError, ValuesError, quantise
from foreseed.engine.blocks import spans, starts
from foreseed.engine.types import NOT_A_DIFFERENCE
from foreseed.wire import RUN_TAG, Reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from foreseed.device.probing import Answer
    from foreseed.engine.types import Buffer
    from foreseed.wire import OrderMessage, Welcome

# Images at once, where a budget does not make it fewer: as many as the widest vector units take side by side. On
# LeNet-5 with 10 % of its weights that is ten times as fast as one by one, in a process 0.4 MB larger.
_BATCH = 16


class Worker:
    """A program ready to run on a shard, in a memory budget if there is one."""

    def __init__(
        self, program: bytes, welcome: Welcome, shard_path: str | os.PathLike[str], budget: int | None
    ) -> None:
        self.program = ProgramHead(program)
        self.shard = open_shard(shard_path, self.program.image_bytes, self.program.classes)
        self._path = os.fspath(shard_path)
        self._fault: tuple[tuple[int, ...] | None, SamplesError | None] = None, None
        """The stamp of a file that was no shard when it was opened, and why."""
        self._batch, self._vectors, self._budget = welcome.batch, welcome.vectors, budget
        self._fits_local_steps = budget is None
        self._starts: tuple[int, ...] = ()
        """Where blocks begin in the last order."""
        self.engine: Engine = self._fit()

    def reload(self) -> bool:
        """Open the shard anew if it is not as it was; returns whether it has another number of samples.

        SamplesError says what is wrong with it, until its file changes.
        """
        if self.shard.is_current:
            return False
        stamp, (known, fault) = stamp_of(self._path), self._fault
        if fault is not None and stamp == known:
            raise fault
        try:
            shard = open_shard(self._path, self.program.image_bytes, self.program.classes)
        except SamplesError as error:
            self._fault = stamp, error
            raise
        self.shard.close()
        before, self.shard, self._fault = self.shard.count, shard, (None, None)
        if self.program.n_stats and self.engine.batch != min(self._batch, shard.count):
            del self.engine  # not two at a time
            self.engine = self._fit(self._fits_local_steps)
        return shard.count != before

    def reserve(self, order: Order) -> None:
        """Change to an engine that leaves enough of the budget to the order; BudgetError if no engine does.

        One that goes on from where a block of layers begins takes more memory: without room for it, passes are whole.
        """
        if starts(order.spans) != self._starts:
            del self.engine  # not two at a time
            self._starts = starts(order.spans)
            self.engine = self._fit(self._fits_local_steps)
        if order.local_steps == 1 or self._fits_local_steps:
            return
        del self.engine  # not two at a time
        try:
            self.engine = self._fit(local_steps=True)
            self._fits_local_steps = True
        except BudgetError:
            self.engine = self._fit()
            raise

    def answer(self, message: OrderMessage, values: Buffer) -> Reply:
        """Follow an order at these values; ValuesError if they are such that no answer makes sense."""
        engine, shard, order = self.engine, self.shard, Order.of(message)
        stats = None
        if self.program.n_stats:
            # Of the device's own images at the values as they are, frozen while it probes.
            stats = engine.batch_stats(values, shard.samples)
            shard.release(0, shard.count)
        result = answer(engine, values, shard.samples, order, stats, shard.release)
        reply = reply_to(message, result, stats)
        numbers = reply.losses if message.bits == 32 else reply.losses[: 4 * (1 + len(message.probed))]
        if not all(map(isfinite, array("f", numbers))):
            raise ValuesError(NOT_A_DIFFERENCE)
        return reply

    def _fit(self, local_steps: bool = False) -> Engine:
        """An engine in what the budget leaves it; BudgetError says how many bytes would do."""
        if self._starts:
            with suppress(BudgetError):  # whole passes then
                return self._engine(local_steps, self._starts)
        return self._engine(local_steps)

    def _engine(self, local_steps: bool, keep: Sequence[int] = ()) -> Engine:
        program, budget = self.program, self._budget
        beside = working_bytes(program.n_live, self._vectors, local_steps)
        if program.n_stats:
            # The statistics are those of batches of this size; elsewhere any batch gives the same bits.
            if not self._batch:
                raise ForeseedError("the program has BatchNorm, the server gives no batch size; check its experiment")
            engine = Engine(program, min(self._batch, self.shard.count), keep=keep)
            if budget is not None and engine.planned_bytes + beside > budget:
                raise over_budget(engine.planned_bytes + beside, budget)
            return engine
        if budget is None:
            return Engine(program, _BATCH, keep=keep)
        try:
            return Engine(program, _BATCH, memory_budget=budget - beside, keep=keep)
        except BudgetError as error:
            raise over_budget(error.needed + beside, budget) from None


def reply_to(message: OrderMessage, result: Answer, stats: array[float] | None) -> Reply:
    """The reply that carries an answer; `stats` are the batch norms' statistics that it was found with.

    Fewer bits than 32 are packed where the answer's differences were: no device has room for both.
    """
    if message.bits == 32:
        losses = (array("f", [result.base_loss]) + result.loss_differences).tobytes()
    else:
        numbers, packed = array("f", [result.base_loss]), []
        for block, span in enumerate(spans(message.probed)):
            differences = memoryview(result.loss_differences)[span.first : span.first + span.k]
            scale, codes = quantise(differences, message.bits, message.seed, message.round, message.device, block)
            numbers.append(scale)
            packed.append(codes)
        losses = b"".join((numbers.tobytes(), *packed))
    return Reply(
        message.run[:RUN_TAG], message.round, message.device, result.samples, losses,
        b"" if stats is None else stats.tobytes(),
    )  # fmt: skip


def working_bytes(n_live: int, vectors: int, local_steps: bool = False) -> int:
    """Bytes that a device works in beyond its engine's plan.

    Kept: the optimiser's vectors. For a while: replaying an update takes a gradient and the zeros that it is made of;
    local steps take a copy of the values as well. A state is fetched into the vectors themselves, a program before
    there is an engine. Messages pass through on top, one at a time, as they do through the MQTT client.
    """
    vector = 4 * n_live
    return vectors * vector + (3 if local_steps else 2) * vector


def over_budget(needed: int, budget: int) -> BudgetError:
    """The error for a run that takes more than a device may use."""
    return BudgetError(
        f"the run needs at least {needed} bytes here, the budget is {budget}; raise --memory-budget, or prune further",
        needed,
    )

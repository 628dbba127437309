"""The devices of a simulation: a pool of threads answers orders, each thread with its own engine."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import fsum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from foreseed.device.probing import Answer, Order, answer, move, split
from foreseed.device.worker import reply_to
from foreseed.engine import Engine, Samples, project
from foreseed.engine.types import Buffer
from foreseed.methods.backprop import LocalTrainer
from foreseed.server import Coordinator
from foreseed.simulate.world import World
from foreseed.wire import NOTHING_HELD, PROGRAM, STATE, OrderMessage, Reply, encode, transfer_bytes

Vector = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")

# Wide: enough images and directions side by side to keep a core's vector units busy, little enough for its cache.
_BATCH, _DIRECTIONS = 32, 8
_TEST_CHUNK = 1000


class Fleet:
    """Answers orders for all devices of a world; results are the same bits for any number of workers."""

    def __init__(self, world: World, participants: Sequence[Sequence[int]] | None = None) -> None:
        """`participants` of every round, to go through a run of a real fleet again; sampled, if not given."""
        self.world, self.participants = world, participants
        self.workers = world.config.workers or os.cpu_count() or 1
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.workers)
        self._local = threading.local()
        # Made here, once: making one traces the model, which is not for several threads at a time.
        needs_torch = world.config.is_bp or world.config.engine == "exact"
        self._first_trainer = LocalTrainer(world.model, world.program) if needs_torch else None

    def close(self) -> None:
        self._pool.shutdown()
        torch.set_num_threads(self._threads)

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The last round is closed: what the summary should say beyond the metrics."""
        return {}

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Results in the order of the items; the work is shared out over the threads."""
        return self._pool.map(work, items)

    def hold_round(self, coordinator: Coordinator) -> dict[str, Any]:
        """Have a round's devices asked and their replies received; returns what went over the wire, for its metrics."""
        present = None if self.participants is None else self.participants[coordinator.round - 1]
        orders = coordinator.open(present)
        up = down = 0
        for order in orders:
            fetched = self._fetched(coordinator, order)
            up, down = up + fetched[0], down + fetched[1] + coordinator.order_bytes(order)
        for reply in self.ask(orders, coordinator.state.values):
            coordinator.receive(reply)
            up += len(encode(reply))
        return {"bytes_up": up, "bytes_down": down}

    def _fetched(self, coordinator: Coordinator, order: OrderMessage) -> tuple[int, int]:
        """Bytes up and down of what a device fetches before it answers: the state if need be, the program at first."""
        state, held, round = coordinator.state, coordinator.state.last_seen[order.device], order.round - 1
        up = down = 0
        if held != round and not order.updates:
            up, down = transfer_bytes(STATE, round, (1 + coordinator.vectors) * state.values.nbytes)
        if held == NOTHING_HELD:
            program = transfer_bytes(PROGRAM, 0, len(self.world.program.bytes))
            up, down = up + program[0], down + program[1]
        return up, down

    def ask(self, orders: Sequence[OrderMessage], values: Vector) -> list[Reply]:
        """Every device's reply. All of them hold the server's values (a catch-up proves that by its hash)."""
        # The largest shards first, so that no thread is left with one at the end.
        sizes = self.world.partition.sizes
        by_size = sorted(range(len(orders)), key=lambda i: -int(sizes[orders[i].device]))
        done = dict(zip(by_size, self.map(lambda i: self._reply(orders[i], values), by_size), strict=True))
        return [done[i] for i in range(len(orders))]

    def evaluate(self, values: Vector, stats: Vector | None = None) -> tuple[float, float]:
        """Accuracy and mean loss on the test images."""
        test = Samples.records(self.world.test, self.world.program.image_bytes)
        chunks = [test.part(at, min(_TEST_CHUNK, test.count - at)) for at in range(0, test.count, _TEST_CHUNK)]
        frozen = stats if stats is not None and stats.size else None
        results = list(self.map(lambda chunk: self.engine.loss(values, chunk, frozen), chunks))
        return sum(correct for _, correct in results) / test.count, fsum(loss for loss, _ in results) / test.count

    @property
    def engine(self) -> Engine:
        """This thread's engine."""
        # BatchNorm's statistics are those of a batch, so there its size is the config's.
        batch = self.world.config.train.batch if self.world.program.n_stats else _BATCH
        return self._mine("engine", lambda: Engine(self.world.program, batch=batch, directions=_DIRECTIONS))

    @property
    def trainer(self) -> LocalTrainer:
        """This thread's copy of the torch model, for backpropagation."""
        assert self._first_trainer is not None
        return self._mine("trainer", self._first_trainer.copy)

    def _mine(self, name: str, make: Callable[[], T]) -> T:
        if not hasattr(self._local, name):
            setattr(self._local, name, make())
        found: T = getattr(self._local, name)
        return found

    def _reply(self, message: OrderMessage, values: Vector) -> Reply:
        order = Order.of(message)
        samples = self.world.samples(message.device)
        # BatchNorm: the statistics of the device's own images at the values as they are, frozen while it probes.
        stats = self.engine.batch_stats(values, samples) if self.world.program.n_stats else None
        exact = self.world.config.engine == "exact"
        result = self._exact(order, values, stats) if exact else answer(self.engine, values, samples, order, stats)
        return reply_to(message, result, stats)

    def _exact(self, order: Order, values: Vector, stats: Buffer | None) -> Answer:
        """What `answer` comes to as sigma goes to 0, by backpropagation."""
        local = array("f", values.tobytes())
        differences, base_loss = self._exact_step(order, local, 0, stats)
        for step in range(1, order.local_steps):
            move(local, differences[-order.k :], order, step - 1)
            differences += self._exact_step(order, local, step, stats)[0]
        return Answer(differences, base_loss, self.world.samples(order.device).count)

    def _exact_step(self, order: Order, values: Buffer, step: int, stats: Buffer | None) -> tuple[array[float], float]:
        """One gradient for each part of the images, then sigma times its product with every direction."""
        images, labels = self.world.images(order.device)
        spans = split(len(images), order.spread)
        gradients, loss = self.trainer.gradient(values, images, labels, spans, stats)
        differences = array("f", bytes(4 * order.k))
        for part, gradient in enumerate(gradients):
            slopes = project(order.directions(part, len(spans), step=step), gradient)
            differences[part :: len(spans)] = array("f", [order.sigma * slope for slope in slopes])
        return differences, loss

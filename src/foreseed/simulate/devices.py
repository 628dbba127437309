"""Simulated devices: a pool of threads answers orders and trains, each thread with its own engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from foreseed.coordinator import Coordinator
from foreseed.device.probing import Answer, Order, answer, move
from foreseed.device.worker import reply_to
from foreseed.engine import Program, Samples, project
from foreseed.engine.blocks import Span
from foreseed.engine.types import Buffer, split
from foreseed.methods.backprop import LocalTrainer
from foreseed.methods.fedavg import client_update
from foreseed.methods.protocol import Job, Local, LocalResult, Prober, Traffic, Vector
from foreseed.methods.task import Task
from foreseed.methods.workers import Workers
from foreseed.simulate.population import Population
from foreseed.simulate.probers import EngineProber, ExactProber
from foreseed.wire import NOTHING_HELD, PROGRAM, STATE, OrderMessage, Reply, encode, transfer_bytes

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[["SimulatedDevices", list[T]], Iterable[R]]
"""What devices in some process make of items."""


class Elsewhere(Protocol):
    """Other processes that hold the same devices, and work in place of this one's threads."""

    def share_out(self, work: Work[T, R], items: Sequence[T], sizes: Sequence[int]) -> list[R]:
        """What `work` makes of the items there, in their order; each process has some of them, even by their sizes.

        It may be done twice, and what it changes stays there: all that it comes to is what it returns.
        """

    def close(self) -> None: ...


class SimulatedDevices:
    """All devices of a population; results are the same bits for any number of workers."""

    def __init__(
        self,
        task: Task,
        population: Population,
        participants: Sequence[Sequence[int]] | None = None,
        workers: Workers | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`participants` of every round, to go through a run of real devices again; sampled, if not given."""
        self.task, self.population, self.participants = task, population, participants
        self._elsewhere = elsewhere
        self._workers = workers or Workers(task)
        self._trainer: tuple[Program | None, LocalTrainer | None] = (None, None)

    def close(self) -> None:
        self._workers.close()
        if self._elsewhere is not None:
            self._elsewhere.close()

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return self._workers.map(work, items)

    def evaluate(self, program: Program, values: Vector, stats: Vector) -> tuple[float, float]:
        return self._workers.evaluate(program, values, stats)

    def digests(self) -> dict[str, str]:
        return self.population.digests()

    def sizes(self) -> npt.NDArray[np.int64]:
        return self.population.partition.sizes

    def costs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A simulation takes nothing but time."""

    def ask(self, coordinator: Coordinator, program: Program) -> Traffic:
        present = None if self.participants is None else self.participants[coordinator.round - 1]
        everyone, before = range(coordinator.rules.devices) if present is None else present, coordinator.refused.copy()
        orders = coordinator.open(present)
        up = down = 0
        while orders:
            for order in orders:
                fetched = _fetched(coordinator, order, program)
                up, down = up + fetched[0], down + fetched[1] + coordinator.order_bytes(order)
            for reply in self.replies(orders, program, coordinator.state.values):
                coordinator.receive(reply)
                up += len(encode(reply))
            # As a real fleet does: another device is asked in the place of one whose answer was refused.
            orders = coordinator.ask_others(everyone)
        refused = dict(coordinator.refused - before)
        return Traffic(up, down, {"refused": refused} if refused else {})

    def visit(self, program: Program, devices: Sequence[int], work: Callable[[Local], R]) -> Iterator[R]:
        if self._elsewhere is not None:
            return self._share_out(lambda there, some: there.visit(program, some, work), devices, devices)
        self._prepare_trainer(program)

        def visited(device: int) -> R:
            return work(Local(device, *self.population.images(device), self._own_trainer(program)))

        return iter(self.map(visited, devices))

    def probe(self, program: Program, devices: Sequence[int], work: Callable[[Prober], R]) -> Iterator[R]:
        if self._elsewhere is not None:
            return self._share_out(lambda there, some: there.probe(program, some, work), devices, devices)
        exact = self.task.config.engine == "exact"
        if exact:
            self._prepare_trainer(program)

        def prober(device: int) -> Prober:
            if exact:
                return ExactProber(device, *self.population.images(device), self._own_trainer(program))
            return EngineProber(device, self.population.rows(device), self._workers.engine(program))

        return iter(self.map(lambda device: work(prober(device)), devices))

    def train(self, job: Job) -> Iterator[LocalResult]:
        config = self.task.config

        def trained_by(local: Local) -> LocalResult:
            trained = client_update(config, job.round, job.lr, local, job.values, job.stats)
            return LocalResult(len(local.images), trained.values, trained.stats, trained.loss)

        return self.visit(job.program, job.devices, trained_by)

    def gradients(self, job: Job) -> Iterator[LocalResult]:
        if self._elsewhere is not None:
            return self._share_out(
                lambda there, some: there.gradients(replace(job, devices=some)), job.devices, job.devices
            )

        def gradient(local: Local) -> LocalResult:
            stats = self._batch_stats(job.program, job.values, local.device)
            parts, loss = local.trainer.gradient(
                job.values, local.images, local.labels, [(0, len(local.images))], stats
            )
            kept = np.zeros(0, np.float32) if stats is None else np.array(stats, np.float32)
            return LocalResult(len(local.images), parts[0], kept, loss)

        return self.visit(job.program, job.devices, gradient)

    def replies(self, orders: Sequence[OrderMessage], program: Program, values: Vector) -> list[Reply]:
        """Every device's reply. All of them hold the server's values (a catch-up proves that by its hash)."""
        if self._elsewhere is not None:
            asked = [order.device for order in orders]
            return list(self._share_out(lambda there, some: there.replies(some, program, values), orders, asked))
        if self.task.config.engine == "exact":
            self._prepare_trainer(program)
        # The largest shards first, so that no thread is left with one at the end.
        sizes = self.population.partition.sizes
        by_size = sorted(range(len(orders)), key=lambda i: -int(sizes[orders[i].device]))
        # An engine leaves nothing else in the caches. So what need not be done between two devices is done for all of
        # them, before and after: what is left between takes less than half the time.
        work = [(Order.of(order), self.population.samples(order.device)) for order in orders]
        found = self.map(lambda i: self._answer(*work[i], program, values), by_size)
        done = dict(zip(by_size, found, strict=True))
        return [reply_to(order, *done[i]) for i, order in enumerate(orders)]

    def _share_out(self, work: Work[T, R], items: Sequence[T], devices: Sequence[int]) -> Iterator[R]:
        """Have work done elsewhere on items, each of which is for a device."""
        assert self._elsewhere is not None
        return iter(self._elsewhere.share_out(work, items, self.population.partition.sizes[list(devices)].tolist()))

    def _answer(
        self, order: Order, samples: Samples, program: Program, values: Vector
    ) -> tuple[Answer, array[float] | None]:
        """What a device found out, and the batch norms' statistics that it was found with."""
        stats = self._batch_stats(program, values, order.device)
        if self.task.config.engine == "exact":
            return self._exact(order, program, values, stats), stats
        return answer(self._workers.engine(program), values, samples, order, stats), stats

    def _batch_stats(self, program: Program, values: Vector, device: int) -> array[float] | None:
        """BatchNorm: the statistics of the device's own images at the values as they are, frozen while it probes."""
        if not program.n_stats:
            return None
        return self._workers.engine(program).batch_stats(values, self.population.samples(device))

    # The limit of short probes, by backpropagation.

    def _prepare_trainer(self, program: Program) -> None:
        """Make the trainer that threads copy: that traces the model, which is not for several threads at a time."""
        if self._trainer[0] is not program:
            self._trainer = (program, LocalTrainer(self.task.model, program))

    def _own_trainer(self, program: Program) -> LocalTrainer:
        """This thread's copy of the torch model."""
        trainer = self._trainer[1]
        assert trainer is not None
        return self._workers.own("trainer", program, trainer.copy)

    def _exact(self, order: Order, program: Program, values: Vector, stats: Buffer | None) -> Answer:
        """What `answer` comes to as sigma goes to 0."""
        local = array("f", values.tobytes())
        differences, base_loss = self._exact_step(order, program, local, 0, stats)
        for step in range(1, order.local_steps):
            move(local, differences[-order.k :], order, step - 1)
            differences += self._exact_step(order, program, local, step, stats)[0]
        return Answer(differences, base_loss, self.population.samples(order.device).count)

    def _exact_step(
        self, order: Order, program: Program, values: Buffer, step: int, stats: Buffer | None
    ) -> tuple[array[float], float]:
        """One gradient for each part of the images, then sigma times its product with every direction."""
        images, labels = self.population.images(order.device)
        found, loss = _gradients(
            lambda parts: self._own_trainer(program).gradient(values, images, labels, parts, stats),
            order.spans,
            len(images),
        )
        differences = array("f", bytes(4 * order.k))
        for span, gradients in zip(order.spans, found, strict=True):
            for part, gradient in enumerate(gradients):
                slopes = project(order.directions(span, part, len(gradients), step=step), gradient)
                there = slice(span.first + part, span.first + span.k, len(gradients))
                differences[there] = array("f", [order.sigma * slope for slope in slopes])
        return differences, loss


Parts = Sequence[tuple[int, int]]


def _gradients(
    gradient: Callable[[Parts], tuple[Vector, float]], spans: Sequence[Span], count: int
) -> tuple[list[Vector], float]:
    """For every span the gradients [part, its values] of the parts of `count` images; and the mean loss.

    Where parts of a division are made of whole parts of the finest one, theirs are their means.
    """
    divisions = {span.spread: split(count, span.spread) for span in spans}
    finest = max(divisions, key=lambda spread: len(divisions[spread]))
    rows, loss = gradient(divisions[finest])
    edges, counts = [first for first, _ in divisions[finest]], _column(divisions[finest])
    found: list[Vector] = []
    for span in spans:
        parts, own = divisions[span.spread], slice(span.at, span.at + span.size if span.size else None)
        starts = [first for first, _ in parts]
        if span.spread == finest:
            found.append(rows[:, own])
        elif set(starts) <= set(edges):
            sums = np.add.reduceat(rows[:, own] * counts, [edges.index(first) for first in starts])
            found.append((sums / _column(parts)).astype(np.float32))
        else:
            found.append(gradient(parts)[0][:, own])
    return found, loss


def _column(parts: Parts) -> npt.NDArray[np.float64]:
    return np.array([[count] for _, count in parts], np.float64)


def _fetched(coordinator: Coordinator, order: OrderMessage, program: Program) -> tuple[int, int]:
    """Bytes up and down of what a device fetches before it answers: the state if need be, the program at first."""
    state, held, round = coordinator.state, coordinator.state.last_seen[order.device], order.round - 1
    up = down = 0
    if held != round and not order.updates:
        up, down = transfer_bytes(STATE, round, (1 + coordinator.vectors) * state.values.nbytes)
    if held == NOTHING_HELD:
        more_up, more_down = transfer_bytes(PROGRAM, 0, len(program.bytes))
        up, down = up + more_up, down + more_down
    return up, down

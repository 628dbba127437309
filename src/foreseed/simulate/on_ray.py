"""Simulations on Ray: devices answered by actors on every node, and whole runs as tasks.

The population lies in the object store, once a node; only orders and replies travel, or local training's values. An
actor or a node that is lost costs a repeat of its orders: Ray starts the actor again, and an answer follows from the
order alone. What a method does on devices by itself (`Devices.visit`, `Devices.probe`) stays with this process.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import foreseed
from foreseed.config import Config
from foreseed.engine import ForeseedError, Program
from foreseed.methods.protocol import Job, LocalResult, Vector
from foreseed.methods.task import Task
from foreseed.simulate.devices import SimulatedDevices
from foreseed.simulate.population import Population
from foreseed.wire import OrderMessage, Reply

SCHEME = "ray"
_START_TIMEOUT = 600.0
"""Seconds for the actors to be there."""


def connect(on: str) -> Any:
    """Ray itself, joined to the cluster at `ray://address`, or to one of this machine's own for plain `ray`."""
    scheme, _, address = on.partition("://")
    if scheme != SCHEME or (not address and on != SCHEME):
        raise ForeseedError(f"--on {on}: expected ray, or ray://HOST:PORT of a cluster that is there")
    if find_spec("ray") is None:
        raise ForeseedError("--on ray needs Ray, which is not installed; pip install 'foreseed[ray]'")
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}.items():
        os.environ.setdefault(name, value)
    import ray

    if not ray.is_initialized():
        try:
            ray.init(
                address=address or "local", include_dashboard=None if address else False, log_to_driver=False,
                logging_level=logging.ERROR,
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ForeseedError(f"--on {on}: Ray says: {reason}; check the address and both ends' versions") from None
    return ray


class Hand:
    """An actor: it holds all devices, and works for those that it is given."""

    def __init__(self, held: list[Any]) -> None:
        import ray

        task: Task
        population: Population
        task, population = ray.get(held)
        self._devices = SimulatedDevices(task, population)
        self._program = task.program

    def versions(self) -> tuple[str, str]:
        """What it runs: the same bits are promised for the same."""
        return versions()

    def process(self) -> int:
        return os.getpid()

    def replies(self, orders: Sequence[OrderMessage], program: Program, values: Vector) -> list[Reply]:
        return self._devices.replies(orders, self._same(program), values)

    def train(self, job: Job) -> list[LocalResult]:
        return list(self._devices.train(replace(job, program=self._same(job.program))))

    def gradients(self, job: Job) -> list[LocalResult]:
        return list(self._devices.gradients(replace(job, program=self._same(job.program))))

    def _same(self, program: Program) -> Program:
        """The very object that engines were made for, unless the program has changed."""
        if program.bytes != self._program.bytes:
            self._program = program
        return self._program


class RayHands:
    """Actors over all nodes of a cluster, one a core; `foreseed.simulate.devices.Elsewhere` says what they do."""

    def __init__(self, on: str, task: Task, population: Population) -> None:
        self._ray = ray = connect(on)
        self._sizes = population.partition.sizes
        _check_room(ray, population)
        cores = int(ray.cluster_resources().get("CPU", 1))
        count = max(1, task.config.workers or cores)
        alone = replace(task, config=task.config.with_({"workers": 1}))
        # Kept as long as the actors: one that is started again asks for them again.
        self._held = [ray.put(alone), ray.put(population)]
        # No core is reserved: an actor of a node that was lost must find room on those that are left.
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")(Hand)
        self._hands = [actor.remote(self._held) for _ in range(count)]
        self._check_versions(on)

    def _check_versions(self, on: str) -> None:
        try:
            found = self._ray.get([hand.versions.remote() for hand in self._hands], timeout=_START_TIMEOUT)
        except self._ray.exceptions.RayError as error:
            raise ForeseedError(f"--on {on}: no worker could be started ({_first_line(error)})") from None
        others = sorted({theirs for theirs in found if theirs != versions()})
        if others:
            theirs, ours = (f"foreseed {a} on Python {b}" for a, b in (others[0], versions()))
            raise ForeseedError(f"--on {on}: a node has {theirs}, and this is {ours}; install the same on every node")

    def replies(self, orders: Sequence[OrderMessage], program: Program, values: Vector) -> list[Reply]:
        """Every device's reply, in the order of the orders."""
        sizes = [int(self._sizes[order.device]) for order in orders]
        return self._shared_out(
            sizes, lambda hand, some: hand.replies.remote([orders[i] for i in some], program, values)
        )

    def train(self, job: Job) -> Iterator[LocalResult]:
        """Local training of the job's devices, in their order."""
        yield from self._shared_out(self._sizes_of(job), lambda hand, some: hand.train.remote(_part(job, some)))

    def gradients(self, job: Job) -> Iterator[LocalResult]:
        """The exact gradient of each of the job's devices, in their order."""
        yield from self._shared_out(self._sizes_of(job), lambda hand, some: hand.gradients.remote(_part(job, some)))

    def _sizes_of(self, job: Job) -> list[int]:
        return [int(self._sizes[device]) for device in job.devices]

    def _shared_out(self, sizes: Sequence[int], ask: Callable[[Any, list[int]], Any]) -> list[Any]:
        """What actors make of items, as even by size as can be, in the items' order; each actor is called once."""
        shares = [share for share in _balanced(sizes, len(self._hands)) if share]
        results = self._ray.get([ask(hand, share) for hand, share in zip(self._hands, shares, strict=False)])
        found = {
            i: one for share, some in zip(shares, results, strict=True) for i, one in zip(share, some, strict=True)
        }
        return [found[i] for i in range(len(sizes))]

    def close(self) -> None:
        for hand in self._hands:
            self._ray.kill(hand)


def _part(job: Job, some: Sequence[int]) -> Job:
    """A job for some of its devices."""
    return replace(job, devices=[job.devices[i] for i in some])


def run_whole(config: Config) -> bytes | str:
    """A whole run on one core of whatever node it comes to: its folder as a tar file, or why it failed."""
    from foreseed.simulate.experiment import run_simulated

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        try:
            run_simulated(config, folder)
        except ForeseedError as error:
            return str(error)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.add(folder, arcname=".")
        return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Put a run's folder where it belongs."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")


def versions() -> tuple[str, str]:
    """Of foreseed and of Python."""
    return foreseed.__version__, platform.python_version()


def _check_room(ray: Any, population: Population) -> None:
    """Refuse a cluster with a node whose object store the population does not fit into."""
    need = population.records.nbytes
    for node in ray.nodes():
        room, name = int(node["Resources"].get("object_store_memory", 0)), node["NodeManagerAddress"]
        if node["Alive"] and room < need:
            raise ForeseedError(
                f"the devices' images take {need / 1e6:.0f} MB, the object store of {name} has {room / 1e6:.0f} MB; "
                "start Ray with a larger --object-store-memory"
            )


def _balanced(sizes: Sequence[int], shares: int) -> list[list[int]]:
    """The numbers of items of these sizes in so many shares, the largest first and each to the lightest share."""
    found: list[list[int]] = [[] for _ in range(shares)]
    loads = np.zeros(shares)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = int(loads.argmin())
        found[lightest].append(i)
        loads[lightest] += sizes[i]
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__

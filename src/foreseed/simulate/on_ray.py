"""Simulations on Ray: actors on every node work for the devices.

The population and the task lie in the object store, once a node; only orders and replies travel, or what a method does
on devices and what comes of it. An actor or a node that is lost costs a repeat of its share: Ray starts the actor
again, and what comes of a device's work follows from the work alone.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np

import foreseed
from foreseed.engine import ForeseedError, Program
from foreseed.methods.task import Task
from foreseed.simulate.devices import SimulatedDevices
from foreseed.simulate.population import Population

SCHEME = "ray"
T = TypeVar("T")
R = TypeVar("R")
_TASK, _PROGRAM = "task", "program"
_Name = str | tuple[bytes, Sequence[str]]
"""What every actor has, or a program."""
_SMALL = 100_000
"""Bytes that go along with a call: Ray would put larger ones into the object store, once for each call."""
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

    _task: Task
    _program: Program
    """The last one that was not the task's own."""

    def __init__(self) -> None:
        self._devices: SimulatedDevices | None = None

    def ready(self, held: list[Any]) -> tuple[str, str]:
        """Fetch all that it needs; gives its versions, since the same bits are promised for the same."""
        self._fetch(held)
        return versions()

    def do(self, held: list[Any], packed: bytes, share: Sequence[int]) -> list[Any]:
        """A share of the work that was packed; `held` comes along, for an actor that was started again has nothing."""
        devices = self._fetch(held)
        unpickler = pickle.Unpickler(io.BytesIO(packed))
        unpickler.persistent_load = self._own  # type: ignore[method-assign]
        work, items = unpickler.load()
        return list(work(devices, [items[i] for i in share]))

    def _fetch(self, held: list[Any]) -> SimulatedDevices:
        if self._devices is None:
            import ray

            self._task, population = ray.get(held)
            self._program = self._task.program
            self._devices = SimulatedDevices(self._task, population)
        return self._devices

    def _own(self, name: _Name) -> Task | Program:
        """What a name stands for; of a program that has not changed the very object that engines were made for."""
        if isinstance(name, str):
            return self._task if name == _TASK else self._task.program
        for program in (self._task.program, self._program):
            if program.bytes == name[0]:
                return program
        self._program = Program(*name)
        return self._program


class RayHands:
    """Actors over all nodes of a cluster, one a core; `foreseed.simulate.devices.Elsewhere` says what they do."""

    def __init__(self, on: str, task: Task, population: Population) -> None:
        self._ray = ray = connect(on)
        self._task = task
        _check_room(ray, population)
        cores = int(ray.cluster_resources().get("CPU", 1))
        count = max(1, task.config.workers or cores)
        alone = replace(task, config=task.config.with_({"workers": 1}))
        self._held = [ray.put(alone), ray.put(population)]
        # No core is reserved: an actor of a node that was lost must find room on those that are left.
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")(Hand)
        self._hands = [actor.remote() for _ in range(count)]
        try:
            found = self._get([hand.ready.remote(self._held) for hand in self._hands], timeout=_START_TIMEOUT)
        except ray.exceptions.RayError as error:
            raise ForeseedError(f"--on {on}: no worker could be started ({_last_line(error)})") from None
        for theirs in found:
            check_versions(theirs)

    def share_out(
        self, work: Callable[[SimulatedDevices, list[T]], Iterable[R]], items: Sequence[T], sizes: Sequence[int]
    ) -> list[R]:
        """What `work` makes of the items there, in their order; each actor is called once."""
        packed = self._pack((work, items))
        at = packed if len(packed) <= _SMALL else self._ray.put(packed)
        shares = [share for share in _balanced(sizes, len(self._hands)) if share]
        results = self._get(
            [hand.do.remote(self._held, at, share) for hand, share in zip(self._hands, shares, strict=False)]
        )
        found = {
            i: one for share, some in zip(shares, results, strict=True) for i, one in zip(share, some, strict=True)
        }
        return [found[i] for i in range(len(items))]

    def _pack(self, work: Any) -> bytes:
        """All of it but what every actor has."""
        packed = io.BytesIO()
        pickler = self._ray.cloudpickle.CloudPickler(packed)
        pickler.persistent_id = self._name
        pickler.dump(work)
        return packed.getvalue()

    def _name(self, found: Any) -> _Name | None:
        """What travels in place of an object that actors have, or may have."""
        if found is self._task:
            return _TASK
        if found is self._task.program:
            return _PROGRAM
        return (found.bytes, found.names) if isinstance(found, Program) else None

    def _get(self, futures: list[Any], timeout: float | None = None) -> list[Any]:
        """Results of actors; a mistake of the user's is the same sentence wherever it was found."""
        try:
            return list(self._ray.get(futures, timeout=timeout))
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ForeseedError):
                raise error.cause from None
            raise

    def close(self) -> None:
        for hand in self._hands:
            self._ray.kill(hand)


def versions() -> tuple[str, str]:
    """Of foreseed and of Python."""
    return foreseed.__version__, platform.python_version()


def check_versions(theirs: tuple[str, str], ours: tuple[str, str] | None = None) -> None:
    """Refuse a node that has others than those who ask it."""
    if theirs != (ours := ours or versions()):
        found, here = (f"foreseed {a} on Python {b}" for a, b in (theirs, ours))
        raise ForeseedError(
            f"a node of the Ray cluster has {found}, and this is {here}; install the same on every node"
        )


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


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__

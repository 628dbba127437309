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
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np

import foreseed
from foreseed.engine import ForeseedError, Program
from foreseed.methods.task import Task
from foreseed.simulate.devices import SimulatedDevices, Work
from foreseed.simulate.population import Population

SCHEME = "ray"
T = TypeVar("T")
R = TypeVar("R")
_TASK, _PROGRAM = "task", "program"
_Name = str | tuple[bytes, Sequence[str]]
"""What every actor has, or a program."""
_SMALL = 100_000
"""Bytes that go along with a call: Ray would put larger ones into the object store, once for each call."""
_REACH_TIMEOUT = 10.0
"""Seconds for the head of a cluster to answer."""
_START_TIMEOUT = 600.0
"""Seconds for the actors to be there."""


def connect(on: str) -> Any:
    """Ray itself, joined to the cluster at `ray://HOST:PORT`, or to one of this machine's own for plain `ray`."""
    scheme, separator, address = on.partition("://")
    host, colon, port = address.rpartition(":")
    if scheme != SCHEME or (separator and not (host and colon and port.isdecimal())) or (on != SCHEME and not address):
        raise ForeseedError(f"--on {on}: expected ray, or ray://HOST:PORT of the head of a cluster")
    if find_spec("ray") is None:
        raise ForeseedError(f"--on {on} needs Ray, which is not installed; pip install 'foreseed[ray]'")
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}.items():
        os.environ.setdefault(name, value)
    import ray

    if not ray.is_initialized():
        if address:
            _check_reachable(on, host, int(port))
        try:
            ray.init(
                address=address or "local", include_dashboard=None if address else False, log_to_driver=False,
                logging_level=logging.CRITICAL,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            remedy = (
                "install the same on every node"
                if "Version mismatch" in reason
                else "this machine has to be a node of the cluster and, if that asks for one, have its token "
                "(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN)"
            )
            raise ForeseedError(f"--on {on}: {reason}; {remedy}") from None
    return ray


def _check_reachable(on: str, host: str, port: int) -> None:
    """Ray itself would try for many minutes."""
    try:
        socket.create_connection((host, port), timeout=_REACH_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ForeseedError(
            f"--on {on}: no cluster answers there ({error}); `ray start --head` prints the address"
        ) from None


class Hand:
    """All devices in one process, and whoever works for some of them."""

    def __init__(self, task: Task, population: Population) -> None:
        self._task, self._devices = task, SimulatedDevices(task, population)
        self._program = task.program
        """The last one that was not the task's own."""

    def do(self, packed: bytes, share: Sequence[int]) -> list[Any]:
        """The work that was packed, for a share of its items."""
        unpickler = pickle.Unpickler(io.BytesIO(packed))
        unpickler.persistent_load = self._meant  # type: ignore[method-assign]
        work, items = unpickler.load()
        return list(work(self._devices, [items[i] for i in share]))

    def _meant(self, name: _Name) -> Task | Program:
        """What a name stands for; of a program that has not changed the very object that engines were made for."""
        if isinstance(name, str):
            return self._task if name == _TASK else self._task.program
        for program in (self._task.program, self._program):
            if program.bytes == name[0]:
                return program
        self._program = Program(*name)
        return self._program


def pack(task: Task, work: Work[T, R], items: Sequence[T]) -> bytes:
    """Work on the task's devices, for any process that has the task."""
    cloudpickle: Any = import_module("ray.cloudpickle")

    def name(found: Any) -> _Name | None:
        if found is task:
            return _TASK
        if found is task.program:
            return _PROGRAM
        return (found.bytes, found.names) if isinstance(found, Program) else None

    packed = io.BytesIO()
    pickler = cloudpickle.CloudPickler(packed)
    pickler.persistent_id = name
    pickler.dump((work, items))
    return packed.getvalue()


class Actor:
    """A hand on some node. Calls bring along what it holds, for one that was started again has nothing."""

    def __init__(self) -> None:
        self._hand: Hand | None = None

    def prepare(self, held: list[Any]) -> tuple[str, str]:
        """Fetch the task and the population; gives its versions."""
        if self._hand is None:
            import ray

            self._hand = Hand(*ray.get(held))
        return versions()

    def do(self, held: list[Any], packed: bytes, share: Sequence[int]) -> list[Any] | ForeseedError:
        """As a hand does; a mistake of the user's is given back, for Ray would print what is raised."""
        self.prepare(held)
        assert self._hand is not None
        try:
            return self._hand.do(packed, share)
        except ForeseedError as error:
            return error


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
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")(Actor)
        self._actors = [actor.remote() for _ in range(count)]
        try:
            found = ray.get([actor.prepare.remote(self._held) for actor in self._actors], timeout=_START_TIMEOUT)
        except ray.exceptions.RayError as error:
            raise ForeseedError(
                f"--on {on}: no worker could be started ({_last_line(error)}); install the same on every node"
            ) from None
        for theirs in found:
            check_versions(theirs)

    def share_out(self, work: Work[T, R], items: Sequence[T], sizes: Sequence[int]) -> list[R]:
        """What `work` makes of the items there, in their order; each actor is called once."""
        packed = pack(self._task, work, items)
        at = packed if len(packed) <= _SMALL else self._ray.put(packed)
        shares = [share for share in balanced(sizes, len(self._actors)) if share]
        called = zip(self._actors, shares, strict=False)
        results = self._ray.get([actor.do.remote(self._held, at, share) for actor, share in called])
        found: dict[int, R] = {}
        for share, some in zip(shares, results, strict=True):
            if isinstance(some, ForeseedError):
                raise some
            found |= zip(share, some, strict=True)
        return [found[i] for i in range(len(items))]

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


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


def balanced(sizes: Sequence[int], shares: int) -> list[list[int]]:
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

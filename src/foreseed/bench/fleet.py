"""What a real fleet costs: bytes on the wire, memory of device processes, and a round's time beyond its computing."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from foreseed.bench.machine import describe_machine
from foreseed.config import Config, load
from foreseed.data import load as load_data
from foreseed.data import shard_name, write_shards
from foreseed.device.member import Member
from foreseed.device.session import Session
from foreseed.fleet.devices import Table
from foreseed.fleet.enrolment import stored_numbers
from foreseed.fleet.experiment import run_served
from foreseed.fleet.local import LocalBroker, Mosquitto
from foreseed.fleet.local_nats import NatsCluster
from foreseed.fleet.testbed import Testbed
from foreseed.runs import Progress, Run, read_run
from foreseed.simulate import prepare
from foreseed.transport.link import broker
from foreseed.transport.loop import Loop

_LIMIT = 64 * 10**6
_WORK = ("prune.pruner=random", "train.k=50", "fleet.deadline=600", "data.partition=iid")
"""Which weights live does not matter here, but how many."""
_BYTES = ("wire_up_bytes", "wire_down_bytes", "payload_up_bytes", "payload_down_bytes")


_BROKERS = {False: "one mosquitto", True: "three nodes of NATS"}


class _Quiet:
    """A test-bed's watch that tells how far it is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def progress(self, progress: Progress) -> None:
        if progress.stage == "train":
            self.say(f"round {progress.done} of {progress.total}")

    def devices(self, table: Table) -> None:
        pass


def bench_fleet(
    devices: int, per_round: int, rounds: int, say: Callable[[str], None], cluster: bool = False
) -> dict[str, Any]:
    """A run of LeNet-5 at density 0.1, K = 50, on real device processes behind a broker with TLS.

    The broker is a mosquitto, or a `cluster` of three nodes of NATS.
    """
    config = _config(devices, per_round, rounds)
    with tempfile.TemporaryDirectory() as folder, Testbed(Path(folder), limit=_LIMIT, cluster=cluster) as bed:
        bed.run(config, _Quiet(say))
        run = read_run(Path(folder) / config.run_name)
    return _result(config, run) | {"tls": bed.secure, "agents": "a process each", "broker": _BROKERS[cluster]}


def bench_light_fleet(
    devices: int, per_round: int, rounds: int, say: Callable[[str], None], cluster: bool = False
) -> dict[str, Any]:
    """The same with processes that hold hundreds of agents, each with a connection of its own, without TLS."""
    _raise_file_limit()
    with tempfile.TemporaryDirectory() as name, NatsCluster.plain() if cluster else Mosquitto.plain() as running:
        folder, nodes = Path(name), running.nodes if isinstance(running, NatsCluster) else [running]
        url = running.urls if isinstance(running, NatsCluster) else running.url
        config = _config(devices, per_round, rounds).with_({"data.set": str(_write_noise(folder / "set.npz", devices))})
        task, population = prepare(config)
        write_shards(load_data(config.data.set), population.partition, folder / "shards")
        meter = _Meter(nodes, folder / "run", say)
        with _light_agents(url, folder / "shards", devices):
            run_served(config, folder / "run", broker(url), say, watch=meter.progress, task=task)
            costs = meter.costs(devices, per_round)
        run = read_run(folder / "run")
    light = {"tls": False, "agents": "hundreds in a process", "broker": _BROKERS[cluster]}
    return _result(config, run) | light | costs


class _Meter(_Quiet):
    """Tells how far a run is, and notes what the broker's and the server's processes have taken by then."""

    def __init__(self, nodes: Sequence[LocalBroker], folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(say)
        self._pids, self._folder = [node.pid for node in nodes], folder
        self._taken: list[tuple[float, float, int]] = []
        """CPU time of broker and server, and how many devices have joined, after each round."""
        self._bytes = self._resident_bytes()
        self._note()

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        if progress.stage == "train" and progress.row is not None:
            self._note()

    def costs(self, devices: int, per_round: int) -> dict[str, float | None]:
        """CPU time and memory: for each device until all have joined, which takes some rounds, then for each answer."""
        joined = next((i for i, taken in enumerate(self._taken) if taken[2] == devices), len(self._taken) - 1)
        (broker, server, _), (broker_joined, server_joined, there), (broker_end, server_end, _) = (
            self._taken[i] for i in (0, joined, -1)
        )
        answers = per_round * (len(self._taken) - 1 - joined)
        return {
            "joined": there,
            "broker_join_ms": (broker_joined - broker) / there,
            "server_join_ms": (server_joined - server) / there,
            "broker_answer_ms": (broker_end - broker_joined) / answers if answers else None,
            "server_answer_ms": (server_end - server_joined) / answers if answers else None,
            "broker_bytes": (self._resident_bytes() - self._bytes) / there,
        }

    def _note(self) -> None:
        taken = sum(map(_cpu_ms, self._pids)), 1000 * time.process_time()
        self._taken.append((*taken, len(stored_numbers(self._folder))))

    def _resident_bytes(self) -> int:
        statm = [Path(f"/proc/{pid}/statm").read_text().split() for pid in self._pids]
        return sum(int(fields[1]) for fields in statm) * os.sysconf("SC_PAGE_SIZE")


def _cpu_ms(pid: int) -> float:
    """CPU time of a process so far, by the clock that Linux keeps of it (what clock_getcpuclockid answers)."""
    return 1000 * time.clock_gettime((~pid << 3) | 2)


def _write_noise(path: Path, images: int) -> Path:
    """A data set with an image for every device: what is in it does not matter here."""
    rng, labels = np.random.default_rng(0), np.arange(max(images, 360)) % 10
    noise = rng.integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    np.savez(path, train_images=noise, train_labels=labels, test_images=noise[:360], test_labels=labels[:360])
    return path


_TOGETHER = 250
"""Agents in a process: each has three descriptors, and paho waits for them with select, which knows 1,024."""


def _raise_file_limit() -> None:
    """For the broker, which is started by this process: a descriptor for each connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def _light_agents(url: str, shards: Path, count: int) -> Iterator[None]:
    """Many devices in a few processes: real members on real connections, and one thread that works for all."""
    processes = multiprocessing.get_context("spawn")
    stop, numbers = processes.Event(), [range(i, min(i + _TOGETHER, count)) for i in range(0, count, _TOGETHER)]
    started = [processes.Process(target=_hold_agents, args=(url, shards, some, stop)) for some in numbers]
    for process in started:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in started:
            process.join()


def _hold_agents(url: str, shards: Path, numbers: range, stop: Event) -> None:
    loop = Loop()
    sessions = [_connect_agent(loop, url, shards, number) for number in numbers]
    loop.run(stop.is_set)
    for session in sessions:
        session.close()


def _connect_agent(loop: Loop, url: str, shards: Path, number: int) -> Session:
    member = Member(shards / shard_name(number), wanted=number, costs=lambda: (0, *session.traffic))
    session = Session(f"device-{number}", member)
    session.connect(loop, broker(url), say=lambda line: None)
    return session


def _config(devices: int, per_round: int, rounds: int) -> Config:
    sizes = (f"data.devices={devices}", f"data.per_round={per_round}", f"rounds={rounds}", f"eval_every={rounds}")
    return load(None, [*_WORK, *sizes])


def _result(config: Config, run: Run) -> dict[str, Any]:
    """Bytes are of one device in one round, with joining, program and states shared out over all rounds."""
    fleet, answers = run.summary.fleet, sum(row.devices for row in run.rounds)
    assert fleet is not None
    return {
        **{key: getattr(fleet, key) / answers for key in _BYTES},
        # A reply alone: the least of a round, as joining and fetching come on top.
        "reply_wire_bytes": min((row.wire_up or 0) / row.devices for row in run.rounds),
        "device_peak_mb": fleet.device_peak_mb,
        "round_overhead_ms": fleet.round_overhead_ms,
        "rounds": len(run.rounds),
        "devices": config.data.devices,
        "per_round": config.data.per_round,
        "replies": answers,
        "refused": sum(fleet.refused.values()),
        "machine": describe_machine(),
    }

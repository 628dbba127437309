"""What a real fleet costs: bytes on the wire, memory of device processes, and a round's time beyond its computing."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from foreseed.bench.machine import describe_machine
from foreseed.config import Config, load
from foreseed.data import load as load_data
from foreseed.data import shard_name, write_shards
from foreseed.device.member import Member
from foreseed.device.session import Session
from foreseed.fleet.devices import Table
from foreseed.fleet.experiment import run_served
from foreseed.fleet.local import Mosquitto
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
    config = _config(devices, per_round, rounds)
    task, population = prepare(config)
    _raise_file_limit()
    with tempfile.TemporaryDirectory() as name, NatsCluster.plain() if cluster else Mosquitto.plain() as running:
        folder, nodes = Path(name), running.nodes if isinstance(running, NatsCluster) else [running]
        url = running.urls if isinstance(running, NatsCluster) else running.url
        write_shards(load_data(config.data.set), population.partition, folder / "shards")
        before = sum(_resident_bytes(node.pid) for node in nodes)
        with _light_agents(url, folder / "shards", devices):
            watch = _Quiet(say).progress
            began = time.process_time()
            run_served(config, folder / "run", broker(url), say, watch=watch, task=task)
            server_ms = 1000 * (time.process_time() - began)
            broker_ms = sum(_cpu_ms(node.pid) for node in nodes)
            grown = sum(_resident_bytes(node.pid) for node in nodes) - before
        run = read_run(folder / "run")
    answers = sum(row.devices for row in run.rounds)
    return _result(config, run) | {
        "tls": False,
        "agents": "hundreds in a process",
        "broker": _BROKERS[cluster],
        # Of all that the run took, joining included, shared out over its answers.
        "broker_cpu_ms": broker_ms / answers,
        "server_cpu_ms": server_ms / answers,
        "broker_bytes": grown / devices,
    }


def _cpu_ms(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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

"""What a real fleet costs: bytes on the wire, memory of device processes, and a round's time beyond its computing."""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from foreseed.bench.machine import describe_machine
from foreseed.config import Config, load
from foreseed.data import shard_name, write_shards
from foreseed.device.member import Member
from foreseed.device.session import Session
from foreseed.serve.local import Mosquitto
from foreseed.serve.served import ServedFleet, Table
from foreseed.serve.testbed import Testbed
from foreseed.simulate import Progress, make_world, run
from foreseed.transport.link import broker
from foreseed.transport.loop import Loop

_LIMIT = 64 * 10**6
_WORK = ("prune.pruner=random", "train.k=50", "fleet.deadline=600", "data.partition=iid")
"""Which weights live does not matter here, but how many."""
_BYTES = ("wire_up_bytes", "wire_down_bytes", "payload_up_bytes", "payload_down_bytes")


class _Quiet:
    """A test-bed's watch that tells how far it is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def progress(self, progress: Progress) -> None:
        if progress.stage == "train":
            self.say(f"round {progress.done} of {progress.total}")

    def devices(self, table: Table) -> None:
        pass


def bench_fleet(devices: int, per_round: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """A run of LeNet-5 at density 0.1, K = 50, on real device processes behind mosquitto with TLS."""
    config = _config(devices, per_round, rounds)
    with tempfile.TemporaryDirectory() as folder, Testbed(Path(folder), limit=_LIMIT) as bed:
        summary = bed.run(config, _Quiet(say))
        rows = _rows(Path(folder) / config.run_name)
    return _result(config, summary, rows) | {"tls": bed.secure, "agents": "a process each"}


def bench_light_fleet(devices: int, per_round: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The same with processes that hold hundreds of agents, each with a connection of its own, without TLS."""
    config = _config(devices, per_round, rounds)
    world = make_world(config)
    _raise_file_limit()
    with tempfile.TemporaryDirectory() as name, Mosquitto.plain() as mosquitto:
        folder = Path(name)
        write_shards(world.data, world.partition, folder / "shards")
        with _light_agents(mosquitto.url, folder / "shards", devices):
            summary = run(
                config, folder / "run", world=world, watch=_Quiet(say).progress,
                devices=lambda world: ServedFleet(world, folder / "run", broker(mosquitto.url), say),
            )  # fmt: skip
        rows = _rows(folder / "run")
    return _result(config, summary, rows) | {"tls": False, "agents": "hundreds in a process"}


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


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def _result(config: Config, summary: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes are of one device in one round, with joining, program and states shared out over all rounds."""
    fleet, answers = summary["fleet"], sum(row["devices"] for row in rows)
    return {
        **{key: fleet[key] / answers for key in _BYTES},
        # A reply alone: the least of a round, as joining and fetching come on top.
        "reply_wire_bytes": min(row["wire_up"] / row["devices"] for row in rows),
        "device_peak_mb": fleet["device_peak_mb"],
        "round_overhead_ms": fleet["round_overhead_ms"],
        "rounds": len(rows),
        "devices": config.data.devices,
        "per_round": config.data.per_round,
        "replies": answers,
        "refused": sum(fleet["refused"].values()),
        "machine": describe_machine(),
    }

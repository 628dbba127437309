"""What a round costs over Flower and over MQTT, measured in one run: bytes, memory and time, both with TLS.

    make flower
    .venv/bin/python examples/flower/bench.py --bin .venv/flower/bin

The same experiment twice, on real processes of this machine: LeNet-5 with 10 % of its weights, K = 50, all devices in
every round. The first round, in which devices join, is left out.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from federation import Federation, FederationError

from foreseed.bench.machine import describe_machine
from foreseed.config import Config, load
from foreseed.data import shard_name
from foreseed.fleet.devices import Table
from foreseed.fleet.testbed import Testbed
from foreseed.runs import Progress, Row, read_run, rows_so_far

_LIMIT = 64 * 10**6
_PATIENCE = 600.0
"""Seconds for a round over Flower."""


class Costs(NamedTuple):
    """Of one device in one round, but for the memory."""

    payload_up: float
    payload_down: float
    wire_up: float
    wire_down: float
    answering_mb: float
    """Peak of the process that answers."""
    all_mb: float
    """Of all processes that a device consists of, their peaks added up."""
    overhead_ms: float
    """A round's time beyond its slowest device's computing, median."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a round costs over Flower and over MQTT.")
    here = Path(sys.executable).parent
    parser.add_argument(
        "--bin", type=Path, default=here, help="where Flower's commands are; beside Python, if not given"
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    if not (options.bin / "flower-superlink").exists():
        sys.exit(
            f"bench.py: no flower-superlink in {options.bin}; make an environment with `make flower`, give its --bin"
        )
    if options.rounds < 2:
        sys.exit("bench.py: --rounds 1 leaves nothing to measure, the first round is left out; give at least 2")
    config = load(
        None,
        [
            "prune.pruner=random", "train.k=50", "data.partition=iid", "fleet.sample=all", f"rounds={options.rounds}",
            f"eval_every={options.rounds}", f"data.devices={options.devices}", f"data.per_round={options.devices}",
        ],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Testbed(Path(folder) / "mqtt", limit=_LIMIT) as bed:
        if not bed.secure:
            sys.exit("bench.py: no mosquitto on this machine; install it: apt install mosquitto")
        mqtt = over_mqtt(bed, config)
        flower = over_flower(bed.folder, Path(folder) / "flower", config, options.bin.resolve())
    print(table(mqtt, flower))
    machine = describe_machine()
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['date']}"
    print(f"\n{options.devices} devices, {options.rounds} rounds; {where}")


def table(mqtt: Costs, flower: Costs) -> str:
    """Markdown."""
    lines = [
        ("payload up, a device and round", "{:,.0f} bytes", "payload_up"),
        ("payload down", "{:,.0f} bytes", "payload_down"),
        ("on the wire up, TLS and polling included", "{:,.0f} bytes", "wire_up"),
        ("on the wire down", "{:,.0f} bytes", "wire_down"),
        ("largest process that answers", "{:.1f} MB", "answering_mb"),
        ("all processes of a device", "{:.1f} MB", "all_mb"),
        ("a round beyond its slowest device's computing, median", "{:,.0f} ms", "overhead_ms"),
    ]
    rows = [
        f"| {name} | {form.format(getattr(mqtt, key))} | {form.format(getattr(flower, key))} |"
        for name, form, key in lines
    ]
    return "\n".join(["| | MQTT | Flower |", "|---|---|---|", *rows])


def over_mqtt(bed: Testbed, config: Config) -> Costs:
    """Device processes behind a mosquitto; they count the bytes on their sockets themselves."""
    bed.run(config, _Quiet())
    rows = read_run(bed.folder / config.run_name).rounds
    up, down = (sum(getattr(row, key) for row in rows[1:]) for key in ("wire_up", "wire_down"))
    return _costs(rows, up, down, _largest_mb(rows))


def over_flower(bed: Path, folder: Path, config: Config, bin: Path) -> Costs:
    """SuperNodes behind a SuperLink, with the same shards and certificates; a proxy between them counts."""
    folder.mkdir()
    experiment, run = folder / "experiment.toml", folder / "run"
    experiment.write_text(config.to_toml())
    with Federation(folder / "federation", bin, bed / "keys") as federation, Proxy(federation.port) as proxy:
        for number in range(config.data.devices):
            federation.add_node({"shard": str(bed / "shards" / shard_name(number)), "number": number}, proxy.port)
        federation.start(experiment=str(experiment), out=str(run))
        meter = _Meter([node.pid for node in federation.nodes])
        up, down = _bytes_after_first_round(run, config.rounds, proxy, meter)
    rows = read_run(run).rounds
    return _costs(rows, up, down, meter.megabytes())


def _bytes_after_first_round(run: Path, rounds: int, proxy: Proxy, meter: _Meter) -> tuple[int, int]:
    """Wait for the run to end, and watch the processes meanwhile; returns bytes up and down in all rounds but one."""
    done, deadline, counts = 0, time.monotonic() + _PATIENCE, list[tuple[int, int]]()
    while not (run / "summary.json").exists():
        meter.look()
        time.sleep(0.05)
        if (now := len(rows_so_far(run)) if run.exists() else 0) > done:
            done, deadline = now, time.monotonic() + _PATIENCE
            counts.append((proxy.up, proxy.down))
            print(f"Flower: round {done} of {rounds}", file=sys.stderr)
        if time.monotonic() > deadline:
            raise FederationError(f"no round ended for {_PATIENCE:.0f} s; the ServerApp's log is that of `flwr log`")
    (first_up, first_down), (up, down) = counts[0], counts[-1]
    return up - first_up, down - first_down


def _costs(rows: Sequence[Row], wire_up: int, wire_down: int, all_mb: float) -> Costs:
    """`wire_up` and `wire_down` are of all rounds but the first."""
    later = rows[1:]
    answers = sum(row.devices for row in later)
    return Costs(
        payload_up=sum(row.bytes_up for row in later) / answers,
        payload_down=sum(row.bytes_down for row in later) / answers,
        wire_up=wire_up / answers,
        wire_down=wire_down / answers,
        answering_mb=_largest_mb(rows),
        all_mb=all_mb,
        overhead_ms=statistics.median(row.round_overhead_ms or 0.0 for row in later),
    )


def _largest_mb(rows: Sequence[Row]) -> float:
    return max(peak for row in rows for peak in row.peaks_kib or ()) * 1024 / 1e6


class _Meter:
    """The peak memory of SuperNodes and of what they start, by command."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._peaks: dict[tuple[int, str], int] = {}

    def look(self) -> None:
        parents, commands, peaks = dict[int, int](), dict[int, str](), dict[int, int]()
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError, KeyError):
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
                pid = int(fields["Pid"])
                peaks[pid] = int(fields["VmHWM"].split()[0])
                parents[pid], commands[pid] = int(fields["PPid"]), fields["Name"]
        for pid in peaks:
            ancestor = pid
            while ancestor not in self._nodes and ancestor in parents:
                ancestor = parents[ancestor]
            if ancestor in self._nodes:
                key = (ancestor, commands[pid])
                self._peaks[key] = max(peaks[pid], self._peaks.get(key, 0))

    def megabytes(self) -> float:
        """Of the largest device."""
        return (
            max(sum(peak for (node, _), peak in self._peaks.items() if node == one) for one in self._nodes) * 1024 / 1e6
        )


class Proxy:
    """Carries connections to a port of this machine, and counts their bytes."""

    def __init__(self, to: int) -> None:
        self._to, self.up, self.down = to, 0, 0
        self._lock, self._server = threading.Lock(), socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open, self._threads = [self._server], [threading.Thread(target=self._accept)]

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up, and wait until nobody carries anything any more."""
        self._hang_up(self._server)
        self._threads[0].join()
        for one in self._open:
            self._hang_up(one)
        for thread in self._threads[1:]:
            thread.join()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._server.accept()[0]
                self._open.append(near)
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open.append(far)
                for source, target, is_up in ((near, far, True), (far, near, False)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._threads.append(threading.Thread(target=self._carry, args=(source, target, is_up)))
                    self._threads[-1].start()

    @staticmethod
    def _hang_up(one: socket.socket) -> None:
        with suppress(OSError):  # whoever waits for it is woken, which closing it does not do
            one.shutdown(socket.SHUT_RDWR)

    def _carry(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if is_up:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class _Quiet:
    """A test-bed's watch that says how far it is."""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr)

    def progress(self, progress: Progress) -> None:
        if progress.stage == "train" and progress.done:
            print(f"MQTT: round {progress.done} of {progress.total}", file=sys.stderr)

    def devices(self, table: Table) -> None:
        pass


if __name__ == "__main__":
    main()

"""A fleet of real processes, killed at random moments: the server, devices, the broker, a node of a cluster.

    python -m tests.fleet.kills --trials 50 --seed 1
    python -m tests.fleet.kills --trials 30 --seed 1 --cluster
    python -m tests.fleet.kills --trials 30 --seed 1 --standby

Every trial is a run of its own that must end with the simulator's weights, to the bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from foreseed.config import Config
from foreseed.coordinator import Coordinator
from foreseed.data import load, load_held_out, shard_name, write_shards
from foreseed.engine import ForeseedError, Program
from foreseed.fleet.devices import FleetDevices
from foreseed.fleet.local import Mosquitto
from foreseed.fleet.local_nats import NatsCluster
from foreseed.methods import Task, make_task
from foreseed.methods.protocol import Traffic
from foreseed.runs import Lease, run
from foreseed.simulate import run_simulated
from foreseed.transport.link import broker
from tests.simulate.small import World, leave_out_the_slow, make_world, small_config, write_bars

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["foreseed.fleet.devices"])
_SILENCE = 4.0
"""Seconds after which a server that is paused is taken for lost."""
_PATIENCE = 300.0
"""Seconds until a trial counts as stuck; a quiet one takes a few."""


def fleet_config(bars: Path, **changes: object) -> Config:
    """A run that real devices finish within seconds, and that is the simulator's to the bit."""
    served = {"rounds": 20, "eval_every": 10, "fleet__sample": "all", "train__robust": "clip", "fleet__max_share": 0.3}
    return small_config(bars, **(served | changes))


class KilledAtTheEnd(FleetDevices):
    """A server that is killed when its last round is on disk, and before devices are told."""

    def costs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().costs(rows)


class Unhurried(FleetDevices):
    """A server whose rounds take long enough to be lost in the middle of a run, however busy the machine is."""

    def ask(self, coordinator: Coordinator, program: Program) -> Traffic:
        time.sleep(0.15)
        return super().ask(coordinator, program)


class Devices:
    """Devices of a run, each in a process of its own that can be killed and started again."""

    def __init__(self, url: str, count: int, folder: Path, shards: Path, save_every: int = 3) -> None:
        self._url, self._folder, self._shards, self._save_every = url, folder, shards, save_every
        folder.mkdir(parents=True, exist_ok=True)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(count):
            self.start(number)

    def start(self, number: int, name: str = "", shard: str = "", numbered: bool = True) -> None:
        with open(self._folder / f"device-{number}.log", "ab") as log:
            self._processes[number] = subprocess.Popen(
                [
                    sys.executable, "-m", "foreseed.device.agent", "--broker", self._url, "--once",
                    "--name", name or f"device-{number}", *(["--number", str(number)] if numbered else []),
                    "--save-every", str(self._save_every), "--shard", str(self._shards / (shard or shard_name(number))),
                    "--state", str(self._folder / f"device-{number}.state"),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def hang(self, number: int) -> None:
        """Let a device do nothing, and nobody be told, as when its network fails."""
        self._processes[number].send_signal(signal.SIGSTOP)

    def go_on(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGCONT)

    def log(self, number: int) -> str:
        """All that a device said, in all its lives."""
        return (self._folder / f"device-{number}.log").read_text()

    def wait(self) -> list[int]:
        """Wait until all have ended by themselves; returns their exit codes."""
        return [process.wait(_PATIENCE) for process in self._processes.values()]

    def close(self) -> None:
        for number in self._processes:
            self.kill(number)

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RealFleet:
    """A broker, a server and its devices, each in a process of its own that can be killed and started again."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        shards: Path,
        kind: type[FleetDevices] = FleetDevices,
        cluster: NatsCluster | None = None,
    ) -> None:
        """`cluster` is the caller's; without it there is a mosquitto."""
        self.config, self.folder, self.cluster = config, folder, cluster
        folder.mkdir(parents=True)
        self.broker = Mosquitto.plain() if cluster is None else None
        self.url = self.broker.url if cluster is None else cluster.urls
        self.start_server(kind)
        self.devices = Devices(self.url, config.data.devices, folder, shards)

    def start_server(self, kind: type[FleetDevices] = FleetDevices) -> None:
        """Start the run, or go on with it; while another server lives, stand by."""
        self.server: BaseProcess = _PROCESSES.Process(
            target=_serve, args=(self.config, self.folder, self.url, kind, _SILENCE)
        )
        self.server.start()

    @property
    def rounds(self) -> int:
        """Rounds that are on the server's disk."""
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    @property
    def log(self) -> str:
        """What the servers said."""
        return (self.folder / "server.log").read_text()

    def wait_for(self, rounds: int) -> None:
        """Until so many are on the disk, or the run is over."""
        end = time.monotonic() + _PATIENCE
        while self.rounds < rounds and self.server.is_alive():
            assert time.monotonic() < end, f"stuck at round {self.rounds}"
            time.sleep(0.001)

    def kill(self, victim: str, number: int, pause: float) -> None:
        """Kill -9 the server, the broker, one of its nodes, or a device, and start it again after a pause."""
        if victim == "server":
            self.server.kill()
            self.server.join()
            time.sleep(pause)
            self.server.close()
            self.start_server()
        elif victim in ("broker", "node"):
            killed = self.broker if self.cluster is None else self.cluster.nodes[number % len(self.cluster.nodes)]
            assert killed is not None
            killed.kill()
            time.sleep(pause)
            killed.start()
        else:
            self.devices.kill(number)
            time.sleep(pause)
            self.devices.start(number)

    def finish(self) -> None:
        """Wait until the run is over."""
        self.server.join(_PATIENCE)
        assert self.server.exitcode == 0, f"the server ended with {self.server.exitcode} at round {self.rounds}"

    def close(self) -> None:
        self.server.kill()
        self.server.join()
        self.devices.close()
        if self.broker is not None:
            self.broker.close()

    def __enter__(self) -> RealFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trial(
    config: Config, folder: Path, shards: Path, random: Random, kills: int, cluster: NatsCluster | None = None
) -> tuple[bytes, list[str]]:
    """One run with so many kills; returns the model that it ended with, and who was killed."""
    killed = []
    with RealFleet(config, folder, shards, cluster=cluster) as fleet:
        for after in sorted(random.randrange(config.rounds) for _ in range(kills)):
            fleet.wait_for(after)
            time.sleep(random.uniform(0, 0.05))
            if not fleet.server.is_alive():
                break
            killed.append(random.choice(["server", "broker" if cluster is None else "node", "device"]))
            fleet.kill(killed[-1], random.randrange(config.data.devices), random.uniform(0, 0.3))
        fleet.finish()
    return (folder / "run" / "model.fsp").read_bytes(), killed


def takeover(config: Config, folder: Path, shards: Path, random: Random, how: str) -> bytes:
    """One run with two servers, of which the first is killed or paused; returns the model that it ended with.

    One that was paused wakes up again at some moment after the second has begun to serve.
    """
    with RealFleet(config, folder, shards, Unhurried) as fleet:
        fleet.wait_for(1)
        first, lost_at = fleet.server, random.randrange(1, config.rounds // 2)
        assert first.pid is not None
        fleet.start_server(Unhurried)
        try:
            fleet.wait_for(lost_at)
            time.sleep(random.uniform(0, 0.2))
            assert fleet.rounds < config.rounds
            os.kill(first.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            fleet.wait_for(random.randrange(fleet.rounds + 1, config.rounds))
            if how == "paused":
                os.kill(first.pid, signal.SIGCONT)
            fleet.finish()
            first.join(_PATIENCE)
            assert first.exitcode == (-signal.SIGKILL if how == "killed" else 1), (first.exitcode, fleet.log)
            assert how == "killed" or "another server has taken this run over" in fleet.log, fleet.log
        finally:
            first.kill()
    return (folder / "run" / "model.fsp").read_bytes()


def simulated(config: Config, folder: Path, world: World) -> bytes:
    """The model that the simulator ends with."""
    run_simulated(config, folder, prepared=world)
    return (folder / "model.fsp").read_bytes()


def _serve(config: Config, folder: Path, url: str, kind: type[FleetDevices], silence: float) -> None:
    leave_out_the_slow(setattr)
    target, log = folder / "run", folder / "server.log"
    with open(log, "a") as file:
        sys.stderr = file

        def task_and_devices(config: Config) -> tuple[Task, FleetDevices]:
            task = make_task(config, load_held_out(config.data.set))
            return task, kind(task, target, broker(url), lambda line: print(line, file=file, flush=True), lease)

        lease = Lease(target, standby=True, silence=silence)
        try:
            run(config, target, task_and_devices, resume=(target / "config.toml").exists(), lease=lease)
        except ForeseedError as error:
            print(error, file=file)
            sys.stderr = sys.__stderr__
            sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill a real fleet at random moments; every run must end as simulated."
    )
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--kills", type=int, default=1, help="kills in a trial")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--standby", action="store_true", help="two servers, of which one is killed or paused")
    parser.add_argument("--cluster", action="store_true", help="three nodes of NATS instead of a mosquitto")
    options = parser.parse_args()
    random, killed, equal = Random(options.seed), Counter[str](), 0
    leave_out_the_slow(setattr)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        cluster = stack.enter_context(NatsCluster.plain()) if options.cluster else None
        config = fleet_config(write_bars(folder / "bars.npz"))
        world = make_world(config)
        write_shards(load(config.data.set), world.population.partition, folder / "shards")
        expected = simulated(config, folder / "simulated", world)
        for number in range(options.trials):
            target = folder / f"trial-{number}"
            if options.standby:
                victims = [random.choice(["killed", "paused"])]
                model = takeover(config, target, folder / "shards", random, victims[0])
            else:
                model, victims = trial(config, target, folder / "shards", random, options.kills, cluster)
            if cluster is not None:
                cluster.wait()
            killed.update(victims)
            same = model == expected
            equal += same
            outcome = "equal" if same else "NOT EQUAL"
            print(f"trial {number + 1}: killed {', '.join(victims) or 'nobody'}; {outcome}", flush=True)
    print(f"{equal} of {options.trials} runs ended bit-equal to the simulator; killed: {dict(killed)}")
    sys.exit(equal != options.trials)


if __name__ == "__main__":
    main()

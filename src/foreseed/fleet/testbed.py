"""The paper's test-bed on one machine: a broker, a server, and device processes that can have only so much memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

from foreseed.config import Config, load
from foreseed.data import load as load_data
from foreseed.data import shard_name, write_shards
from foreseed.engine import ForeseedError
from foreseed.fleet.devices import Table, check
from foreseed.fleet.embedded import EmbeddedBroker
from foreseed.fleet.experiment import run_served
from foreseed.fleet.keys import SERVER, Identity, make_keys
from foreseed.fleet.local import Mosquitto, executable
from foreseed.fleet.local_nats import LOOPBACK, NatsCluster
from foreseed.runs import Progress, Summary, prune_watch
from foreseed.simulate import Population, prepare
from foreseed.transport.link import broker

_AGENT = [sys.executable, "-m", "foreseed.device.agent"]
_EXIT_TIMEOUT = 30.0
"""Seconds that devices get to end when the run is over."""

_PAPER = {
    "name": "ntk-baffle", "rounds": 100, "eval_every": 5, "data.devices": 10, "data.per_round": 2, "data.beta": 0.1,
    "train.k": 50, "train.lr": 0.003, "fleet.sample": "all",
}  # fmt: skip
_BAFFLE = {"method": "baffle", "name": "baffle", "train.lr": 0.001}
"""The dense arm's estimate is ten times as noisy, so its steps are shorter."""


class Watch(Protocol):
    """What shows a test-bed at work."""

    def progress(self, progress: Progress) -> None: ...
    def devices(self, table: Table) -> None: ...
    def say(self, line: str) -> None: ...


def arms(file: Path | None, overrides: Sequence[str], baffle: bool) -> list[Config]:
    """The experiment (the paper's test-bed, if no file is given), and the same by plain BAFFLE."""
    config = load(file, overrides) if file else load(None, [f"{k}={v}" for k, v in _PAPER.items()] + list(overrides))
    check(config)
    if not baffle or config.method == "baffle":
        return [config]
    return [config, config.with_(_BAFFLE)]


class Testbed:
    """A broker and a folder; `run` starts devices, serves a run to them, and sees them off."""

    def __init__(self, folder: Path, *, limit: int, embedded: bool = False, cluster: bool = False) -> None:
        """`limit`: bytes of address space (RLIMIT_AS) that a device may have: all that it maps, libraries too.

        `cluster`: three nodes of NATS instead of a mosquitto.
        """
        self.folder, self.limit, self.cluster = folder, limit, cluster
        self.secure = not embedded and executable() is not None
        self._stack = ExitStack()
        self._environment: dict[str, str] = {}
        self._url = ""

    def __enter__(self) -> Testbed:
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ForeseedError(f"{self.folder} exists and is not empty; choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._environment = _device_environment(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, config: Config, watch: Watch) -> Summary:
        """Serve one run to devices of its own; returns its summary."""
        watch.say(f"each device may have {self.limit / 1e6:.0f} MB of address space (RLIMIT_AS), libraries included")
        task, population = prepare(config, prune_watch(config, watch.progress))
        names = [f"device-{number}" for number in range(config.data.devices)]
        self._prepare(config, population, names)
        folder = self.folder / config.run_name
        with ExitStack() as stack:
            devices = [
                stack.enter_context(
                    _Device(self._command(config, number, name), self._environment, self._log(config, name), self.limit)
                )
                for number, name in enumerate(names)
            ]
            at = broker(self._url, insecure=False, **self._credentials(SERVER))

            def look(table: Table) -> None:
                for device in devices:
                    device.check()
                watch.devices(table)

            summary = run_served(config, folder, at, watch.say, watch=watch.progress, look=look, task=task)
            for device in devices:
                device.end()
        return summary

    def _prepare(self, config: Config, population: Population, names: Sequence[str]) -> None:
        """Shards, keys and the broker, for the first arm; the others share them."""
        shards = self.folder / "shards"
        if not shards.exists():
            write_shards(load_data(*config.data.source), population.partition, shards)
        if self._url:
            return
        if self.cluster:
            make_keys(self.folder / "keys", names, LOOPBACK, for_nats=True)
            self._url = self._stack.enter_context(NatsCluster.of(self.folder / "keys")).urls
        elif self.secure:
            make_keys(self.folder / "keys", names)
            mosquitto = self._stack.enter_context(Mosquitto.secure(self.folder / "keys"))
            self._url = mosquitto.tls_url
        else:
            self._url = self._stack.enter_context(EmbeddedBroker()).url

    def _command(self, config: Config, number: int, name: str) -> list[str]:
        options = {
            "broker": self._url, "name": name, "number": str(number), "shard": str(self._shard(number)),
            "state": str(self.folder / "states" / f"{config.run_name}-{name}"), **self._credentials(name),
        }  # fmt: skip
        words = [word for key, value in options.items() if value for word in (f"--{key}", value)]
        return [*_AGENT, "--once", *words]

    def _credentials(self, name: str) -> dict[str, str]:
        if not self.secure:
            return {}
        identity = Identity(self.folder / "keys", name)
        return {"ca": str(identity.ca), "cert": str(identity.cert), "key": str(identity.key)}

    def _shard(self, number: int) -> Path:
        return self.folder / "shards" / shard_name(number)

    def _log(self, config: Config, name: str) -> Path:
        for folder in ("logs", "states"):
            (self.folder / folder).mkdir(exist_ok=True)
        return self.folder / "logs" / f"{config.run_name}-{name}.log"


class _Device:
    """A device's process; it ends with the run, or is ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, limit: int) -> None:
        self._log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, preexec_fn=_limited(limit),
                env=environment,
            )  # fmt: skip

    def __enter__(self) -> _Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        """Raise if the device has ended although the run goes on: the server would wait for it."""
        code = self._process.poll()
        if code is not None:
            raise ForeseedError(
                f"a device ended with code {code} in the middle of the run; see {self._log}, or raise --limit"
            )

    def end(self) -> None:
        """Stop the device; the server's word that the run is over has ended it already, if it came in time for that."""
        self._process.terminate()
        try:
            code = self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise ForeseedError(f"a device does not end although the run is over; see {self._log}") from None
        if code not in (0, -signal.SIGTERM):
            raise ForeseedError(f"a device ended with code {code} when the run was over; see {self._log}")


def _device_environment(folder: str) -> dict[str, str]:
    """The environment of a device: its modules are compiled, into this folder, and there is one heap.

    Installing compiles modules; a process that has to do it itself holds 8 MB more. glibc would set 128 MB of addresses
    aside for the link's thread; the shipped systemd unit says the same.
    """
    environment = os.environ | {"PYTHONPYCACHEPREFIX": folder, "MALLOC_ARENA_MAX": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([*_AGENT, "--version"], stdout=subprocess.DEVNULL, env=environment, check=True)
    return environment


def _limited(limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

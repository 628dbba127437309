"""A Flower federation on the loopback: a SuperLink, SuperNodes, and the app of this folder run on them.

Nobody outside is asked: neither Flower's telemetry, nor its update check, nor an index of packages.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

APP = Path(__file__).parent
ALONE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "UV_OFFLINE": "1",
}
"""The environment in which Flower keeps to itself."""
_PATIENCE, _FAREWELL = 60.0, 10.0
"""Seconds for a SuperLink to answer, and for a process to end: one that has a run waits for it."""


class FederationError(Exception):
    """A federation that does not come up, or ends before it should."""


class Federation:
    """A SuperLink; `add_node` starts SuperNodes beside it, `run` has it run the app."""

    def __init__(self, folder: Path, bin: Path = Path(sys.executable).parent, keys: Path | None = None) -> None:
        """`bin` is where Flower's commands are. Logs and Flower's home are put in the folder.

        `keys`: a folder that `foreseed fleet keys` has written, for TLS; without, all is in plain text.
        """
        self.folder, self.bin, self._keys = folder, bin, keys
        self.port = free_port()
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self._environment = os.environ | ALONE | {
            "FLWR_HOME": str(folder / "flwr"),
            "PATH": f"{bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }  # fmt: skip

    def __enter__(self) -> Federation:
        (self.folder / "flwr").mkdir(parents=True, exist_ok=True)
        secure = "insecure = true" if self._keys is None else f'root-certificates = "{self._keys / "ca.crt"}"'
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "localhost:{self.port}"\n{secure}\n'
        )
        with ExitStack() as stack:
            link = self._start("superlink", ["flower-superlink", *self._link_tls(), "--port", str(self.port)], stack)
            self._wait_for(link)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add_node(self, config: Mapping[str, str | int], link_port: int | None = None) -> subprocess.Popen[bytes]:
        """Start a SuperNode with this `--node-config`; `link_port` is where it finds the SuperLink."""
        node = self._start(
            f"node-{len(self.nodes)}",
            [
                "flower-supernode", *self._node_tls(), "--superlink", f"localhost:{link_port or self.port}", "--port",
                str(free_port()), "--node-config", _toml(config),
            ],
            self._stack,
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def start(self, **options: str | bool) -> int:
        """Start a run with these values of `--run-config`; returns its number."""
        return int(self._flwr("run", str(APP), "--run-config", _toml(options)).split("started run ")[1].split()[0])

    def run(self, **options: str | bool) -> str:
        """The same to its end; returns what it said."""
        return self._flwr("run", str(APP), "--stream", "--run-config", _toml(options))

    def stop(self, run: int) -> None:
        self._flwr("stop", str(run))

    def log(self, name: str = "superlink") -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _flwr(self, *words: str) -> str:
        done = subprocess.run(
            [self.bin / "flwr", *words], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FederationError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}\n{self.log()}")
        return done.stdout

    def _start(self, name: str, command: Sequence[str], stack: ExitStack) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [self.bin / command[0], *command[1:]], env=self._environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        stack.callback(end, process)
        return process

    def _link_tls(self) -> list[str]:
        if self._keys is None:
            return ["--insecure"]
        files = {
            "ssl-ca-certfile": "ca.crt",
            "ssl-certfile": "mosquitto/broker.crt",
            "ssl-keyfile": "mosquitto/broker.key",
        }
        return [word for key, file in files.items() for word in (f"--{key}", str(self._keys / file))]

    def _node_tls(self) -> list[str]:
        return ["--insecure"] if self._keys is None else ["--root-certificates", str(self._keys / "ca.crt")]

    def _wait_for(self, link: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and link.poll() is None:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            time.sleep(0.1)
        raise FederationError(f"the SuperLink does not answer:\n{self.log()}")


def _toml(options: Mapping[str, str | int | bool]) -> str:
    """Keys and values as Flower's commands take them."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in options.items())


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process; those that it started end by themselves."""
    process.terminate()
    try:
        process.wait(_FAREWELL)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""Brokers on the loopback, for test-beds and tests; they can be killed and started again on the same ports."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from foreseed.engine.errors import ForeseedError

_START_TIMEOUT = 20.0
"""Seconds until a broker that does not come up is given up; it takes some milliseconds."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class LocalBrokerError(ForeseedError):
    """A broker that cannot be started here."""


class LocalBroker:
    """A running broker's process; use it as a context manager, or call `close`."""

    program = ""

    def __init__(self, config: str, ports: list[int], host: str = "127.0.0.1") -> None:
        self.ports, self.host = ports, host
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.program}-"))
        self._config = self._folder / "broker.conf"
        self._config.write_text(self._localised(config))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def _localised(self, config: str) -> str:
        """The configuration, once the broker has a folder of its own."""
        return config

    @property
    def port(self) -> int:
        """The port of a plain broker; the port for client certificates of a secure one."""
        return self.ports[0]

    @property
    def pid(self) -> int:
        """The broker's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """All that the broker said, in all its lives."""
        path = self._folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        """Start the broker, and wait until it listens on all its ports."""
        program = executable(self.program)
        if program is None:
            raise LocalBrokerError(
                f"no {self.program} on this machine; install it (Debian: apt-get install {self.program})"
            )
        with open(self._folder / "log", "ab") as log:
            command = [program, "-c", str(self._config)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + _START_TIMEOUT
        while not all(_is_listening(self.host, port) for port in self.ports):
            if self._process.poll() is not None or time.monotonic() > end:
                raise LocalBrokerError(f"{self.program} did not start: {self.log[-1000:]}")
            time.sleep(0.005)
        # Whoever listens there must be this broker.
        if self._process.poll() is not None:
            raise LocalBrokerError(f"{self.program} ended: {self.log[-1000:]}")

    def kill(self) -> None:
        """End the broker as kill -9 does: nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill the broker if it runs, and start it on the same ports."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End the broker and remove its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mosquitto(LocalBroker):
    """A mosquitto."""

    program = "mosquitto"

    @staticmethod
    def plain() -> Mosquitto:
        """A broker that lets anybody in, without TLS."""
        (port,) = free_ports(1)
        # As root, mosquitto would become another user, who cannot read our files.
        lines = [
            "user root", f"listener {port} 127.0.0.1", "allow_anonymous true", "persistence false",
            "max_queued_messages 100000", "set_tcp_nodelay true", "log_dest stderr",
        ]  # fmt: skip
        return Mosquitto("\n".join(lines) + "\n", [port])

    @staticmethod
    def secure(keys_folder: Path) -> Mosquitto:
        """A broker with the configuration in a folder of `foreseed fleet keys`, changed in its ports only."""
        ports = free_ports(2)
        config = (keys_folder / "mosquitto.conf").read_text()
        for shipped, port in zip((8883, 8884), ports, strict=True):
            config, changed = re.subn(rf"(?m)^listener {shipped}$", f"listener {port} 127.0.0.1", config)
            if changed != 1:
                raise LocalBrokerError(f"{keys_folder}/mosquitto.conf: expected one listener on port {shipped}")
        return Mosquitto(config, ports)

    @property
    def password_port(self) -> int:
        """Where clients give a name and a password, over TLS."""
        return self.ports[1]

    @property
    def url(self) -> str:
        """The address of a plain broker."""
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def tls_url(self) -> str:
        return f"mqtts://127.0.0.1:{self.port}"

    @property
    def password_url(self) -> str:
        return f"mqtts://127.0.0.1:{self.password_port}"


def executable(program: str = "mosquitto") -> str | None:
    """The broker of this machine, if there is one."""
    # Debian puts it where only root's PATH leads.
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True

"""A NATS cluster on the loopback, for benchmarks and tests; each node can be killed and started again."""

from __future__ import annotations

import os
import re
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Self

from foreseed.fleet.local import LocalBroker, LocalBrokerError, free_ports
from foreseed.fleet.nats import INSTALLED, STORE, configurations

LOOPBACK = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Hosts of three nodes on one machine: `foreseed fleet keys` for these makes keys for a cluster here."""
_READY_TIMEOUT = 60.0
"""Seconds until nodes that do not agree on a leader are given up; it takes a few."""
_SHIPPED_PORTS = (8883, 4222, 6222)
_SECRETS = re.compile(r"(?ms)^ *(?:tls|authorization) \{.*?\}\n")


class NatsNode(LocalBroker):
    """A node at an address of its own."""

    program = "nats-server"

    def __init__(self, config: str, host: str, ports: list[int], keys: Path | None) -> None:
        """`ports` are for MQTT, NATS, other nodes (in a cluster) and questions; `keys` its certificates."""
        for shipped, port in zip(_SHIPPED_PORTS, ports, strict=False):
            config = re.sub(rf"\b{shipped}\b", str(port), config)
        config = config.replace("host: 0.0.0.0", f"host: {host}").replace("host: 127.0.0.1", f"host: {host}")
        config += f'\nhttp: "{host}:{ports[-1]}"\n'
        self._keys = keys
        super().__init__(config, ports, host)

    def _localised(self, config: str) -> str:
        config = config.replace(STORE, str(self._folder / "store"))
        if self._keys is None:
            return _SECRETS.sub("", config)
        config = config.replace(f"{INSTALLED}/", f"{self._keys}/")
        # Relative to the file that includes it, whatever the path looks like.
        return config.replace('"users.conf"', f'"{os.path.relpath(self._keys / "users.conf", self._folder)}"')

    @property
    def is_healthy(self) -> bool:
        """Whether it agrees with the other nodes on what is retained."""
        try:
            return self._ask("/healthz")[0] == 200
        except OSError:
            return False

    @property
    def connections(self) -> str:
        """Who is connected, as the node tells it."""
        return self._ask("/connz")[1].decode()

    def _ask(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection(self.host, self.ports[-1], timeout=5.0)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class NatsCluster:
    """Three nodes that know each other, or one alone; use it as a context manager, or call `close`."""

    def __init__(self, configs: dict[str, str], keys: Path | None) -> None:
        self.secure, ports = keys is not None, free_ports(4)
        used = ports if len(configs) > 1 else [*ports[:2], ports[3]]
        self.nodes: list[NatsNode] = []
        try:
            for host, config in configs.items():
                self.nodes.append(NatsNode(config, host, used, keys))
            self.wait()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def plain(hosts: tuple[str, ...] = LOOPBACK) -> NatsCluster:
        """Nodes that let anybody in, without TLS."""
        return NatsCluster(dict(zip(hosts, configurations(hosts, "").values(), strict=True)), None)

    @staticmethod
    def of(keys_folder: Path) -> NatsCluster:
        """Nodes with the configuration in a folder of keys, changed in their ports and folders only."""
        folder = keys_folder.resolve() / "nats"
        configs = {path.stem: path.read_text() for path in sorted(folder.glob("*.conf")) if path.stem != "users"}
        return NatsCluster({LOOPBACK[0] if host == "foreseed" else host: c for host, c in configs.items()}, folder)

    @property
    def urls(self) -> str:
        """What `--broker` takes."""
        scheme = "mqtts" if self.secure else "mqtt"
        return ",".join(f"{scheme}://{node.host}:{node.ports[0]}" for node in self.nodes)

    def wait(self) -> None:
        """Until all nodes are well."""
        end = time.monotonic() + _READY_TIMEOUT
        while not all(node.is_healthy for node in self.nodes):
            if time.monotonic() > end:
                raise LocalBrokerError(f"the nodes do not find together: {self.nodes[0].log[-1000:]}")
            time.sleep(0.02)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

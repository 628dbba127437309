"""What nats-server is told of a fleet: its nodes, and what each name may do, as the ACL does for mosquitto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

INSTALLED = "/etc/nats/foreseed"
"""Where the shipped configuration expects what is in `nats/`."""
STORE = "/var/lib/nats/foreseed"
"""Where it keeps what is retained."""
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""The hosts of a broker for a trial."""
_NODES = 3
"""Of a cluster, at least: those that are left have a majority when one is lost. So many hold what is retained."""

_HOST = "broker.example.org"


def is_cluster(hosts: Sequence[str]) -> bool:
    """Whether these are the nodes of a cluster, rather than names of one machine."""
    return len(hosts) >= _NODES and set(hosts) != set(THIS_MACHINE)


def configurations(hosts: Sequence[str], password: str) -> dict[str, str]:
    """The files of a broker's nodes: one node alone, or one for each host, who know each other by a password."""
    shipped = resources.files("foreseed") / "deploy" / "nats"
    node, cluster = ((shipped / name).read_text() for name in ("foreseed.conf", "cluster.conf"))
    if not is_cluster(hosts):
        return {"foreseed.conf": _named(node, hosts[0])}
    route = next(line for line in cluster.splitlines(True) if "nats-route://" in line)
    routes = "".join(route.replace(_HOST, f"[{host}]" if ":" in host else host) for host in hosts)
    cluster = cluster.replace(route, routes).replace("PASSWORD", password)
    node = node.replace("stream_replicas: 1", f"stream_replicas: {_NODES}")
    return {f"{_file_name(host)}.conf": _named(node, host) + cluster for host in hosts}


def _named(node: str, host: str) -> str:
    return node.replace(f'server_name: "{_HOST}"', f'server_name: "{host}"')


def _file_name(host: str) -> str:
    return host.replace(":", "-")


def users(lines: Iterable[str]) -> str:
    """The file of users, a line each."""
    return "".join(("users: [\n", *(f"{line}\n" for line in lines), "]\n"))


def user_lines(text: str) -> dict[str, str]:
    """The lines of such a file, by name; a line that its owner has made a comment is that name's too."""
    lines = [line for line in text.splitlines() if "CN=" in line]
    return {line.partition("CN=")[2].partition('"')[0]: line for line in lines}


def device_line(name: str) -> str:
    """A device: its own presence and replies, its own orders, and what the server tells all."""
    mine = f"foreseed.1.d.{name}"
    return _line(name, [f"{mine}.here", f"{mine}.up.*"], ["foreseed.1.all", f"{mine}.down.*"])


def server_line(name: str) -> str:
    """The server: everything."""
    everything = ["foreseed.1", "foreseed.1.>"]
    return _line(name, everything, everything)


def _line(name: str, publish: list[str], subscribe: list[str]) -> str:
    # MQTT alone: in NATS's own protocol, $MQTT.sub.>, which MQTT's subscriptions need, would give others' messages.
    permissions: Mapping[str, list[str]] = {"publish": publish, "subscribe": [*subscribe, "$MQTT.sub.>"]}
    user = {"user": f"CN={name}", "allowed_connection_types": ["MQTT"], "permissions": permissions}
    return f"    {json.dumps(user)}"

"""The MQTT topics of the protocol (`docs/protocol.md`)."""

from __future__ import annotations

ROOT = "foreseed/1"
ALL = f"{ROOT}/all"
"""The server's announcement, retained."""
EVERY_UP, EVERY_HERE = f"{ROOT}/d/+/up/+", f"{ROOT}/d/+/here"
"""What a server reads."""


def here(name: str) -> str:
    """A device's presence, retained."""
    return f"{ROOT}/d/{name}/here"


def up(name: str, instance: str) -> str:
    """From a device's process to the server."""
    return f"{ROOT}/d/{name}/up/{instance}"


def down(name: str, instance: str) -> str:
    """From the server to a device's process."""
    return f"{ROOT}/d/{name}/down/{instance}"


def sender(topic: str) -> tuple[str, str]:
    """The name (empty: the server's own topic) and the instance (empty: its presence) behind what a server reads."""
    levels = topic.split("/")
    return levels[3] if len(levels) > 3 else "", levels[5] if len(levels) > 5 else ""

"""A federation in one process: real ClientApps behind a Grid whose nodes come, go, crash and dawdle as tests say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, cast

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from foreseed_flower import client_app

Fault = Callable[[Message], str]
"""What becomes of a message: "" (it is answered), "crash", "lost" (no reply ever), "late" or "garbage"."""

_PATIENCE = 300.0
"""Seconds until a run counts as stuck; one takes a moment."""


def carried(content: RecordDict) -> RecordDict:
    """What arrives of a content."""
    proto = ProtoRecordDict()
    proto.ParseFromString(recorddict_to_proto(content).SerializeToString())
    return recorddict_from_proto(proto)


class Loopback:
    """Nodes by number, each with its config and its context; a stand-in for a SuperLink's Grid."""

    def __init__(self) -> None:
        # As the process of an app sets it.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self._deadline = time.monotonic() + _PATIENCE
        self.contexts: dict[int, Context] = {}
        self.faults: dict[int, Fault] = {}
        self.offline: set[int] = set()
        self.types: list[tuple[int, str]] = []
        """Of every message that went out: node and type."""
        self._replies: dict[str, Message] = {}
        self._late: list[tuple[str, Message]] = []
        self._ids = (f"message-{number}" for number in count())

    @property
    def grid(self) -> Grid:
        return cast(Grid, self)

    def add(self, node: int, **config: Any) -> Context:
        """A SuperNode starts."""
        self.contexts[node] = Context(1, node, config, RecordDict(), {})
        return self.contexts[node]

    def forget(self, node: int) -> None:
        """A node's state is lost."""
        self.contexts[node].state = RecordDict()

    def release_late(self) -> None:
        """What was held back arrives."""
        self._replies |= dict(self._late)
        self._late = []

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        assert time.monotonic() < self._deadline, "the run waits for what never comes"
        return [self._replies.pop(id) for id in message_ids if id in self._replies]

    def _push(self, message: Message) -> str:
        id, node = next(self._ids), message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = id
        self.types.append((node, message.metadata.message_type))
        fault = self.faults.get(node, lambda message: "")(message)
        if fault == "lost" or node in self.offline:
            return id
        if fault == "crash":
            self._replies[id] = Message(Error(code=0, reason="the node crashed"), reply_to=message)
        elif fault == "garbage":
            self._replies[id] = Message(RecordDict(), reply_to=message)
        else:
            message.content = carried(message.content)
            reply = client_app.app(message, self.contexts[node])
            reply.content = carried(reply.content)
            if fault == "late":
                self._late.append((id, reply))
            else:
                self._replies[id] = reply
        return id

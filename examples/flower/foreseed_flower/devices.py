"""The nodes of a Flower federation as foreseed's devices: a thin driver around the conductor, as MQTT's is.

A node is welcomed by `query.join` when it appears, and asked by `train`. Flower carries a request and its reply and
nothing else, so what a device says of its own accord (that it is ready, or gone) is said here in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from foreseed.coordinator import Coordinator
from foreseed.engine import Program
from foreseed.fleet.conductor import Conductor, Send
from foreseed.fleet.costs import fleet_costs
from foreseed.fleet.enrolment import store_numbers, stored_numbers
from foreseed.fleet.real import RealDevices
from foreseed.fleet.status import StatusFile
from foreseed.methods.ntk_baffle import run_id
from foreseed.methods.protocol import Traffic
from foreseed.methods.task import Task
from foreseed.runs import Lease, times_gone_back
from foreseed.wire import ANY_NUMBER, NOTHING_HELD, STATE, Join, Leave, OrderMessage, Presence, Welcome, encode
from foreseed.wire import Ready as ReadyMessage
from foreseed_flower.records import (
    JOIN,
    TRAIN,
    Lacks,
    Ready,
    Refused,
    content_bytes,
    join_records,
    order_records,
    read_reply,
    welcome_for,
)

_POLL = 0.2
"""Seconds between two looks for replies."""
_LOOK = 3.0
"""Seconds between two looks at who is online."""
_RETRY = 30.0
"""Seconds after which a node that could not do what it was asked is asked to join again."""
_LONGEST = 300
"""Characters of a reason that a node gives: it may say anything."""
_WORD = 30.0
"""Seconds of a round after which the user is told whom it waits for; then after twice as many, and so on."""


@dataclass
class Node:
    """A SuperNode that is online."""

    id: int
    name: str = ""
    """Of the device that it is, once it has said which."""
    ready: Ready | None = None
    orders: int = 0
    """That it has not replied to yet."""
    join_at: float = 0.0
    """When to ask it to join."""
    said: str = ""
    """The last line about it."""

    @property
    def instance(self) -> str:
        return blake2b(str(self.id).encode(), digest_size=4).hexdigest()


class Asked(NamedTuple):
    """A message that a node has not replied to yet."""

    node: Node
    order: OrderMessage | None
    """None for a join."""


class FlowerDevices(RealDevices):
    """The devices that a SuperLink reaches."""

    def __init__(self, task: Task, folder: Path, grid: Grid, lease: Lease, say: Callable[[str], None]) -> None:
        super().__init__(task)
        self._folder, self._grid, self._lease, self._say = folder, grid, lease, say
        self._conductor: Conductor | None = None
        self._nodes: dict[int, Node] = {}
        self._asked: dict[str, Asked] = {}
        """By the message's id."""
        self._looked = 0.0
        self._bytes = {"up": 0, "down": 0}
        self._status, self._over = StatusFile(folder, task.config.run_name, task.config.rounds), False

    def costs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        self._over = True
        return fleet_costs(rows, stored_numbers(self._folder))

    def close(self) -> None:
        if self._conductor is not None and not self._lease.is_lost:
            self._status.end(self._conductor, {}, self._over)
        self._workers.close()

    def ask(self, coordinator: Coordinator, program: Program) -> Traffic:
        self._check_program(program)
        conductor = self._conductor or self._start(coordinator)
        self._asked_at, refused = None, conductor.refused.copy()
        self._bytes = {"up": 0, "down": 0}
        conductor.open(time.monotonic())
        word_at, wait = time.monotonic() + _WORD, _WORD
        while not conductor.complete:
            self._lease.check_known()
            self._look()
            self._deliver(conductor.tick(time.monotonic()))
            if not self._pull():
                time.sleep(_POLL)
            self._status.write(conductor, {}, time.monotonic())
            if time.monotonic() > word_at:
                self._say(conductor.waiting_for(time.monotonic()))
                word_at, wait = time.monotonic() + wait, 2 * wait
        replies = coordinator.replies
        if conductor.late:
            wanted, deadline = coordinator.rules.per_round, self.task.config.fleet.deadline
            self._say(f"round {coordinator.round}: {len(replies)} of {wanted} answers within {deadline:g} s")
        measured = self._measured(replies) | {"refused": dict(conductor.refused - refused)}
        return Traffic(self._bytes["up"], self._bytes["down"], measured)

    def _start(self, coordinator: Coordinator) -> Conductor:
        config, program = self.task.config, self.task.program
        # A run has its own rounds, wherever they are held: Flower's run begins anew when ours goes on.
        run = run_id(config, times_gone_back(self._folder))
        coordinator.rules = replace(coordinator.rules, run=run)
        self._conductor = Conductor(
            coordinator, config.fleet, program.bytes, config.train.batch if program.n_stats else 0, bytes(8),
            stored_numbers(self._folder), lambda numbers: store_numbers(self._folder, numbers, self._lease),
            say=self._say,
        )  # fmt: skip
        return self._conductor

    # Who is there.

    def _look(self) -> None:
        """Ask nodes that are new, or could not take part before, to join; let go of those that are offline."""
        now = time.monotonic()
        if now < self._looked + _LOOK:
            return
        self._looked, online = now, set(self._grid.get_node_ids())
        for node in [node for node in self._nodes.values() if node.id not in online]:
            del self._nodes[node.id]
            self._mark_gone(node)
        for node_id in sorted(online - self._nodes.keys()):
            self._nodes[node_id] = Node(node_id)
        self._push([(node, None) for node in self._nodes.values() if node.join_at <= now])

    def _joined(self, node: Node, ready: Ready) -> None:
        """A node is ready: as the device of its number, or as one that takes any."""
        assert self._conductor is not None
        name = f"node-{node.id}" if ready.number == ANY_NUMBER else f"device-{ready.number}"
        holder = next((other for other in self._nodes.values() if other.name == name and other is not node), None)
        if holder is not None:
            self._put_off(node, f"{name} is node {holder.id} already; give every SuperNode a number of its own")
            return
        node.name, node.ready = name, ready
        self._deliver(self._conductor.receive(name, node.instance, encode(Join(ready.number)), time.monotonic()))

    def _put_off(self, node: Node, reason: str) -> None:
        """A node cannot do what it was asked: others are asked in its place, and it is asked to join again later."""
        node.join_at = time.monotonic() + _RETRY
        reason = "".join(letter for letter in reason[:_LONGEST] if letter.isprintable())
        if reason != node.said:
            node.said = reason
            self._say(f"node {node.id}: {reason}")
        self._mark_gone(node)

    def _mark_gone(self, node: Node) -> None:
        assert self._conductor is not None
        if node.ready is not None:
            node.ready, gone = None, Presence(bytes.fromhex(node.instance), False)
            self._deliver(self._conductor.presence(node.name, encode(gone), time.monotonic()))
        node.name = ""

    # What goes out.

    def _deliver(self, sends: Sequence[Send]) -> None:
        """Carry out what the conductor says; acknowledgements are for devices that would send again."""
        orders, nodes = list[tuple[Node, OrderMessage | None]](), {node.name: node for node in self._nodes.values()}
        for name, instance, message in sends:
            self._status.note(name, message)
            node = nodes.get(name)
            if node is None or node.instance != instance or node.ready is None:
                continue  # it is offline
            if isinstance(message, OrderMessage):
                orders.append((node, message))
            elif isinstance(message, Welcome) and not node.orders:
                self._say_ready(node, node.ready)
            elif isinstance(message, Leave):
                self._say(f"node {node.id}: {message.reason}")
                node.ready, node.join_at = None, float("inf")
        self._push(orders)

    def _say_ready(self, node: Node, ready: Ready) -> None:
        assert self._conductor is not None
        message = ReadyMessage(self._conductor.coordinator.rules.run, ready.held, ready.samples)
        self._deliver(self._conductor.receive(node.name, node.instance, encode(message), time.monotonic()))

    def _push(self, requests: Sequence[tuple[Node, OrderMessage | None]]) -> None:
        messages = []
        for node, order in requests:
            content = self._join_content() if order is None else order_records(order, self._state_for(order))
            self._bytes["down"] += content_bytes(content)
            round = str(self._coordinator.round)
            messages.append(Message(content, node.id, JOIN if order is None else TRAIN, group_id=round))
            if order is None:
                node.join_at = float("inf")
            else:
                node.orders += 1
                self._asked_at = self._asked_at or time.monotonic()
        for (node, order), message_id in zip(requests, self._grid.push_messages(messages), strict=True):
            self._asked[message_id] = Asked(node, order)

    @property
    def _coordinator(self) -> Coordinator:
        assert self._conductor is not None
        return self._conductor.coordinator

    def _join_content(self) -> Any:
        program, config, coordinator = self.task.program, self.task.config, self._coordinator
        batch = config.train.batch if program.n_stats else 0
        return join_records(
            welcome_for(coordinator.rules.run, program.bytes, batch, coordinator.vectors), program.bytes
        )

    def _state_for(self, order: OrderMessage) -> bytes | None:
        """The state, for a node that can neither replay its way to it nor holds it."""
        holds_it = int(self._coordinator.state.last_seen[order.device]) == order.round - 1
        return None if order.updates or holds_it else self._coordinator.state_bytes()

    # What comes in.

    def _pull(self) -> bool:
        """Take the replies that are there; returns whether there were any."""
        replies = list(self._grid.pull_messages(list(self._asked))) if self._asked else []
        for reply in replies:
            asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                self._take(asked, reply)
        return bool(replies)

    def _take(self, asked: Asked, reply: Message) -> None:
        assert self._conductor is not None
        node, order = asked
        node.orders -= order is not None
        if node.id not in self._nodes:
            return  # it has gone offline since
        if reply.has_error():
            self._put_off(node, f"no reply ({reply.error.reason})")
            return
        self._bytes["up"] += content_bytes(reply.content)
        try:
            said = read_reply(reply.content, order)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._put_off(node, f"a reply that cannot be read ({error!r}); install the same foreseed here and there")
            return
        match said:
            case Ready():
                self._joined(node, said)
            case Refused():
                self._put_off(node, said.reason)
                self._check_values(order)
            case Lacks():
                self._give(node, said)
            case _:
                assert order is not None
                if node.ready is not None:
                    node.ready, node.said = node.ready._replace(held=order.round - 1), ""
                    data, now = encode(said), time.monotonic()
                    self._deliver(self._conductor.receive(node.name, node.instance, data, now))

    def _give(self, node: Node, lacks: Lacks) -> None:
        """Ask again, with what was lacking: the state comes with the order, the program with a join."""
        if lacks.what == STATE and node.ready is not None:
            node.ready = node.ready._replace(held=NOTHING_HELD)
            self._say_ready(node, node.ready)
        else:
            self._mark_gone(node)
            node.join_at = 0.0

    def _check_values(self, order: OrderMessage | None) -> None:
        """Where values have grown too large, no device can answer. The test images show that too: this raises."""
        if order is not None and not self._coordinator.replies:
            state = self._coordinator.state
            self.evaluate(self.task.program, state.values, state.stats)

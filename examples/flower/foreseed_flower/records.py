"""What ServerApp and ClientApp say to each other: orders in a ConfigRecord, a device's numbers in a MetricRecord.

| server | node |
|---|---|
| `query.join`: run, program and what it takes to answer | ready: number, round of the values held, samples |
| `train`: an order, with the state where the node needs it | answer: the base loss, and a number a direction |

Instead of either, a node may say which part it lacks, or in one line why it cannot.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from foreseed.wire import RUN_TAG, OrderMessage, Reply, Welcome, decode, encode, program_hash

JOIN, TRAIN = "query.join", "train"


class Ready(NamedTuple):
    """A node that can be asked."""

    number: int
    """That it wants, or ANY_NUMBER."""
    held: int
    samples: int


class Lacks(NamedTuple):
    """A node that needs PROGRAM or STATE before it can answer."""

    what: int


class Refused(NamedTuple):
    """A node that cannot do what it was asked."""

    reason: str


def join_records(welcome: Welcome, program: bytes) -> RecordDict:
    """What a node is sent before its first order."""
    return RecordDict({"join": ConfigRecord({"welcome": encode(welcome), "program": program})})


def read_join(content: RecordDict) -> tuple[Welcome, bytes]:
    record: Any = content["join"]
    welcome = decode(record["welcome"], Welcome)
    assert isinstance(welcome, Welcome)
    return welcome, record["program"]


def order_records(order: OrderMessage, state: bytes | None) -> RecordDict:
    """An order; `state` are the values, then the optimiser's vectors, for a node that cannot replay its way there."""
    record = ConfigRecord({"order": encode(order)})
    if state is not None:
        record["state"] = state
    return RecordDict({"order": record})


def read_order(content: RecordDict) -> tuple[OrderMessage, bytes | None]:
    record: Any = content["order"]
    order = decode(record["order"], OrderMessage)
    assert isinstance(order, OrderMessage)
    return order, record.get("state")


def answer_records(reply: Reply, order: OrderMessage) -> RecordDict:
    """A reply's numbers; of fewer bits than 32, the base loss and scales, and the packed codes beside them."""
    packed = b"" if order.bits == 32 else reply.losses[4 * (1 + len(order.probed)) :]
    numbers: dict[str, Any] = {
        "num-examples": reply.samples,
        "losses": array("f", reply.losses[: len(reply.losses) - len(packed)]).tolist(),
        "compute-ms": reply.compute_ms,
        "peak-kib": reply.peak_kib,
    }
    if reply.stats:
        numbers["stats"] = array("f", reply.stats).tolist()
    codes = {"codes": ConfigRecord({"packed": packed})} if packed else {}
    return RecordDict({"answer": MetricRecord(numbers), **codes})


def ready_records(ready: Ready) -> RecordDict:
    return RecordDict(
        {"ready": MetricRecord({"number": ready.number, "held": ready.held, "num-examples": ready.samples})}
    )


def lacks_records(lacks: Lacks) -> RecordDict:
    return RecordDict({"lacks": ConfigRecord({"what": lacks.what})})


def refused_records(refused: Refused) -> RecordDict:
    return RecordDict({"refused": ConfigRecord({"reason": refused.reason})})


def read_reply(content: RecordDict, order: OrderMessage | None) -> Reply | Ready | Lacks | Refused:
    """What a node said to an order, or to a join; ValueError, TypeError or KeyError if it is neither.

    The numbers are checked by whoever takes them, as those of any device are.
    """
    said: Any = content
    if "refused" in said:
        return Refused(str(said["refused"]["reason"]))
    if "lacks" in said:
        return Lacks(int(said["lacks"]["what"]))
    if order is None:
        ready = said["ready"]
        return Ready(int(ready["number"]), int(ready["held"]), int(ready["num-examples"]))
    answer = said["answer"]
    packed = said["codes"]["packed"] if "codes" in said else b""
    return Reply(
        order.run[:RUN_TAG], order.round, order.device, answer["num-examples"],
        array("f", answer["losses"]).tobytes() + packed, array("f", answer.get("stats", [])).tobytes(),
        answer["compute-ms"], answer["peak-kib"],
    )  # fmt: skip


def content_bytes(content: RecordDict) -> int:
    """Bytes that Flower counts for a message's content."""
    return sum(record.count_bytes() for record in content.values())


def welcome_for(run: bytes, program: bytes, batch: int, vectors: int) -> Welcome:
    """What every node is told; its number it learns with each order."""
    return Welcome(run, 0, program_hash(program), len(program), batch, vectors)

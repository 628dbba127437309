"""The ClientApp: a device's answer to an order. It needs neither PyTorch nor the server's part of foreseed.

Flower starts a process for each message, so all that a device holds lies in `context.state` between two of them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from foreseed.device.memory import peak_bytes
from foreseed.device.state import RunState
from foreseed.device.worker import Worker
from foreseed.engine import ForeseedError, ProgramError
from foreseed.wire import ANY_NUMBER, NOTHING_HELD, PROGRAM, STATE, Welcome, encode, program_hash
from foreseed_flower.records import (
    Lacks,
    Ready,
    Refused,
    answer_records,
    lacks_records,
    read_join,
    read_order,
    ready_records,
    refused_records,
)

app = ClientApp()
_HELD = "foreseed"
"""The record of the state that holds what the device does."""


class NodeError(ForeseedError):
    """A node that was started in a way that it cannot take part."""


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Take the program, and say who this is and what it holds."""
    return _reply(message, lambda: _join(message.content, context))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer an order with K numbers."""
    return _reply(message, lambda: _answer(message.content, context))


def _join(content: RecordDict, context: Context) -> RecordDict:
    welcome, program = read_join(content)
    if program_hash(program) != welcome.program_hash:
        raise ProgramError("the program has another hash than the server says; start the server's run again")
    worker = Worker(program, welcome, _shard(context), None)
    held = _held(context)
    if held is None or held[0] != welcome:
        n = worker.program.n_live
        vectors = [array("f", bytes(4 * n)) for _ in range(welcome.vectors)]
        state = RunState(
            welcome.run, 0, welcome.program_hash, program, NOTHING_HELD, array("f", bytes(4 * n)), vectors
        )  # fmt: skip
        _hold(context, welcome, state)
    else:
        state = held[1]
    return ready_records(Ready(_number(context), state.round, worker.shard.count))


def _answer(content: RecordDict, context: Context) -> RecordDict:
    began = time.monotonic()
    order, numbers = read_order(content)
    held = _held(context)
    if held is None or held[0].run != order.run:
        return lacks_records(Lacks(PROGRAM))
    welcome, state = held
    if numbers is not None:
        state.write(0, numbers)
        state.round = order.round - 1  # as the server says; the order's hash proves it
    is_there = state.catch_up(order)
    _hold(context, welcome, state)
    if not is_there:
        return lacks_records(Lacks(STATE))
    reply = Worker(state.program, welcome, _shard(context), None).answer(order, state.values)
    ms = int(1000 * (time.monotonic() - began))
    return answer_records(reply._replace(compute_ms=ms, peak_kib=peak_bytes() // 1024), order)


def _reply(message: Message, work: Callable[[], RecordDict]) -> Message:
    """The node's reply; what it cannot do is said in one line, here and to the server."""
    try:
        content = work()
    except ForeseedError as error:
        print(f"foreseed: {error}", flush=True)
        content = refused_records(Refused(str(error)))
    return Message(content, reply_to=message)


def _shard(context: Context) -> str:
    shard = context.node_config.get("shard")
    if not isinstance(shard, str) or not shard:
        raise NodeError(
            "no shard: start the SuperNode with --node-config 'shard=\"/path/to/shard.bin\"', a file as "
            "`foreseed data shard` writes it"
        )
    return shard


def _number(context: Context) -> int:
    number = context.node_config.get("number", ANY_NUMBER)
    if type(number) is not int or number < ANY_NUMBER:
        raise NodeError(
            f"number {number!r} given; start the SuperNode with a whole number, as in --node-config 'number=3'"
        )
    return number


def _held(context: Context) -> tuple[Welcome, RunState] | None:
    """What the messages before left in the context."""
    if _HELD not in context.state:
        return None
    record: Any = context.state[_HELD]
    welcome, program = read_join(RecordDict({"join": record}))
    numbers: array[float] = array("f", record["numbers"])
    n = len(numbers) // (1 + welcome.vectors)
    values, *vectors = (numbers[at : at + n] for at in range(0, len(numbers), n))
    state = RunState(welcome.run, 0, welcome.program_hash, program, record["round"], values, vectors)
    return welcome, state


def _hold(context: Context, welcome: Welcome, state: RunState) -> None:
    numbers = b"".join(vector.tobytes() for vector in (state.values, *state.vectors))
    context.state[_HELD] = ConfigRecord(
        {"welcome": encode(welcome), "program": state.program, "round": state.round, "numbers": numbers}
    )

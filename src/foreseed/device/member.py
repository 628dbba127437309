"""A device's side of the protocol: takes the server's messages, returns its own. It does no I/O but read its shard.

`receive` is quick, so that an order that a later one has replaced is never followed; `work` does what takes time:
catching up and answering. `docs/protocol.md` shows who says what when. A device loads this module: see `probing.py`.
"""

from __future__ import annotations

import os
import time
from array import array

from foreseed.device.probing import Order, OrderError
from foreseed.device.state import RunState
from foreseed.device.worker import Worker, over_budget
from foreseed.engine import BudgetError, ForeseedError, ProgramError, SamplesError, ValuesError
from foreseed.wire import (
    ANY_NUMBER,
    CHUNK,
    NOTHING_HELD,
    PROGRAM,
    STATE,
    Ack,
    Announce,
    Chunk,
    Fetch,
    Join,
    Leave,
    OrderMessage,
    Ready,
    Reply,
    VersionError,
    Welcome,
    WireError,
    decode,
    program_hash,
)
from foreseed.wire.messages import MAX_DIRECTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from foreseed.wire import Message

_RETRY_SOON, _FIRST_RETRY, _LONGEST_RETRY = 1.0, 5.0, 60.0
"""Seconds until a request that nobody has answered is sent again."""
_PROGRAM_ATTEMPTS, _STATE_ATTEMPTS = 3, 2
_REPORT_AFTER = 2
"""Retries of a join, until the user is told that no server answers."""
_OTHER_VERSION = "other version"


class Member:
    """A device in a run: who it is, what it holds, what it was asked."""

    def __init__(
        self,
        shard_path: str | os.PathLike[str],
        *,
        wanted: int = ANY_NUMBER,
        memory_budget: int | None = None,
        saved: RunState | None = None,
        costs: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`wanted` is the number to have in the run, `saved` what a state file had.

        `memory_budget`: bytes for what is counted in `worker.py`; the interpreter comes on top. `costs` gives the
        process's peak in KiB and the bytes that it has sent and received. `say` takes a line for the user.
        """
        self.state = saved
        """All that is worth keeping over a restart, once there is a program."""
        self.welcome: Welcome | None = None
        self.worker: Worker | None = None
        self.epoch = b""
        """Of the server that announced itself last: 4 bytes of the run's folder, 2 count its servers, 2 connections."""
        self._announced_run: bytes | None = None
        self.finished = False
        """Whether the run that this device is in has ended."""
        self.rejection: str | None = None
        """Why this device takes no part until another epoch is announced: the server's reason, or its own."""
        self.last_ack: Ack | None = None
        """The server's last word on an answer, where it is clear which one it means."""
        self.refused: dict[str, int] = {}
        """Messages that changed nothing, by reason."""
        self._shard_path, self._wanted, self._budget = shard_path, wanted, memory_budget
        self._costs, self._say = costs, say
        self._join_request: _Request | None = None
        self._no_server_reported = False
        self._download: _Download | None = None
        """Of the program, as long as there is no state; then of the state that the order needs."""
        self._chunks: list[bytes] = []
        self._order: OrderMessage | None = None
        self._shard_fault = ""
        """What is wrong with the shard, as it was said last, until it is put right."""
        self._attempts = 0
        """How often the program, or the state that an order needs, has arrived so far."""
        self._latest_round = 1
        self._answered: tuple[OrderMessage, Reply] | None = None
        self._answered_traffic = self._counted_traffic = (0, 0)
        """Bytes sent and received when the last answer was made, and the last one that is known to count."""
        self._unacknowledged: _Request | None = None
        """The answer, until the server has said that it arrived."""
        self._resent_round = 0
        """The last round whose answer was sent more than once."""

    @property
    def held(self) -> int:
        """The round whose values are in memory, or NOTHING_HELD."""
        return NOTHING_HELD if self.state is None else self.state.round

    @property
    def run(self) -> bytes | None:
        """The run that this device is in, or was in before it restarted."""
        if self.welcome is not None:
            return self.welcome.run
        return None if self.state is None else self.state.run

    @property
    def round(self) -> int | None:
        """The round of the order that waits for an answer."""
        return None if self._order is None else self._order.round

    def connected(self) -> list[Message]:
        """What to say after every connection: the broker has forgotten us, and so may the server have."""
        return [] if self.rejection is not None else self._join()

    def receive(self, data: bytes) -> list[Message]:
        """Take a message of the server; returns what to send. One that makes no sense here changes nothing.

        `rejection` says why, if this device cannot take part: it was sent away, or what it was sent does not fit it.
        """
        try:
            message = decode(data, Announce, Welcome, Chunk, OrderMessage, Ack, Leave)
        except VersionError as error:
            first = _OTHER_VERSION not in self.refused
            line = f"the server cannot be understood: {error}; install the same foreseed here and there"
            return self._refuse(_OTHER_VERSION, line if first else "")
        except WireError:
            return self._refuse("malformed")
        try:
            return self._dispatch(message)
        except ForeseedError as error:
            return self._leave(str(error))

    def work(self) -> list[Message]:
        """Catch up and answer the order, if there is one: takes as long as it takes. Returns what to send."""
        order, state, worker = self._order, self.state, self.worker
        if order is None or state is None or worker is None or self._download is not None:
            return []
        began = time.monotonic()
        if not state.catch_up(order):
            return self._fetch_state(order, state)
        try:
            samples = worker.shard.count
            if worker.reload():
                return self._on_other_shard(samples)
            reply = worker.answer(order, state.values)
        except ValuesError as error:
            self._order = None
            return self._refuse("not finite", f"round {order.round}: no answer: {error}")
        except SamplesError as error:
            return self._on_bad_shard(order, error)
        except BudgetError as error:
            return self._leave(str(error))
        if not worker.shard.is_current:
            return []  # what it was computed from is no longer there: once more, with what is
        self._order, self._shard_fault = None, ""
        peak, sent, received = self._costs()
        ms = int(1000 * (time.monotonic() - began))
        up, down = self._counted_traffic
        reply = reply._replace(compute_ms=ms, peak_kib=peak, sent=sent - up, received=received - down)
        self._answered_traffic = sent, received
        self._answered, self._unacknowledged = (order._replace(updates=()), reply), _Request(reply)
        return [reply]

    def _on_other_shard(self, before: int) -> list[Message]:
        """Say how many images there are now; the server, if it still waits, asks again."""
        assert self.worker is not None
        self._order, self._shard_fault = None, ""
        self._say(f"{os.fspath(self._shard_path)}: the shard has {self.worker.shard.count} images now, it had {before}")
        return self._ready()

    def _on_bad_shard(self, order: OrderMessage, error: SamplesError) -> list[Message]:
        """Keep the order: it is followed as soon as the shard can be read, if no later one has come."""
        if str(error) == self._shard_fault:
            return []
        self._shard_fault = str(error)
        return self._refuse("bad shard", f"round {order.round}: no answer: {error}; waiting for the shard")

    def tick(self, now: float) -> list[Message]:
        """Requests that timed out without an answer, to be sent again; `now` is a clock's time in seconds."""
        asked = (self._join_request, None if self._download is None else self._download.request, self._unacknowledged)
        due = [request for request in asked if request is not None and request.is_due(now)]
        if self._unacknowledged in due:
            self._mark_resent()
        if self._join_request in due and self._join_request.retries == _REPORT_AFTER and not self._no_server_reported:
            self._no_server_reported = True
            self._say("no server answers; is one running, and is --name the name that the broker knows this device by?")
        return [request.message for request in due]

    def _dispatch(self, message: Message) -> list[Message]:
        match message:
            case Announce():
                return self._on_announce(message)
            case Welcome():
                return self._on_welcome(message)
            case Chunk():
                return self._on_chunk(message)
            case OrderMessage():
                return self._on_order(message)
            case Ack():
                return self._on_ack(message)
        assert isinstance(message, Leave)
        return self._leave(f"the server sent this device away: {message.reason}")

    # Joining a run.

    def _join(self) -> list[Message]:
        self.rejection, self._join_request = None, _Request(Join(self._wanted))
        return [self._join_request.message]

    def _on_announce(self, announce: Announce) -> list[Message]:
        if announce.epoch[:4] == self.epoch[:4] and announce.epoch[4:6] < self.epoch[4:6]:
            return self._refuse("older server")  # it was paused, and another has taken its place
        known, self.epoch = announce.epoch == self.epoch, announce.epoch
        if announce.finished:
            # Also for a device that was still about to join it.
            self.finished = announce.run in (self.run, self._announced_run)
            self._join_request = None
            if self.finished:
                self._unacknowledged = None
            return []
        self.finished, self._announced_run = self.finished and known, announce.run
        if self._join_request is not None:
            # It was said before the server could hear it, or the answer is on its way.
            self._join_request = _Request(self._join_request.message, _RETRY_SOON)
            return []
        # A server that has just started knows nobody.
        return [] if known else self._join()

    def _leave(self, reason: str) -> list[Message]:
        """Ask nothing and follow nothing until another epoch is announced; a program and values that fit are kept."""
        self.rejection, self.welcome, self.worker = reason, None, None
        self._join_request = self._download = self._order = self._unacknowledged = None
        self._chunks = []
        return []

    def _on_welcome(self, welcome: Welcome) -> list[Message]:
        if welcome != self.welcome:
            self._start_run(welcome)
        self.rejection, self._join_request, self._no_server_reported, self._latest_round = None, None, False, 1
        if self.worker is None:
            assert self._download is not None
            return [self._download.fetch]
        return self._ready()

    def _start_run(self, welcome: Welcome) -> None:
        """Take a place in a run, with the program if it is the one held, and the values if they are of this run."""
        if self._budget is not None and 2 * welcome.program_bytes > self._budget:
            raise over_budget(2 * welcome.program_bytes, self._budget)
        saved, self.worker = self.state, None
        self.welcome, self._order, self._answered, self._unacknowledged = welcome, None, None, None
        self._attempts = self._resent_round = 0
        if saved is None or saved.program_hash != welcome.program_hash:
            self.state = None
            self._fetch_program(welcome)
            return
        self._download = None
        if saved.run != welcome.run:
            saved.round = NOTHING_HELD
        self._load_program(welcome, saved.program, saved)

    def _fetch_program(self, welcome: Welcome) -> None:
        self._chunks = []
        self._download = _Download(Fetch(welcome.run, PROGRAM, 0, 0), welcome.program_bytes)

    def _load_program(self, welcome: Welcome, program: bytes, saved: RunState | None = None) -> None:
        """Make ready to answer: an engine, the shard, and room for the values, which may be there already."""
        self.worker = Worker(program, welcome, self._shard_path, self._budget)
        n_live = self.worker.program.n_live
        round, numbers = (NOTHING_HELD, []) if saved is None else (saved.round, [saved.values, *saved.vectors])
        if [len(vector) for vector in numbers] != [n_live] * (1 + welcome.vectors):
            round, numbers = NOTHING_HELD, [array("f", [0.0]) * n_live for _ in range(1 + welcome.vectors)]
        values, *vectors = numbers
        self.state = RunState(welcome.run, welcome.device, welcome.program_hash, program, round, values, vectors)

    def _ready(self) -> list[Message]:
        assert self.welcome is not None
        assert self.worker is not None
        return [Ready(self.welcome.run, self.held, self.worker.shard.count)]

    # Fetching.

    def _on_chunk(self, chunk: Chunk) -> list[Message]:
        download, state = self._download, self.state
        if download is None or not download.expects(chunk):
            return self._refuse("unexpected chunk")
        if state is None:
            self._chunks.append(chunk.data)
        else:
            state.write(chunk.offset, chunk.data)
        if not download.advance(chunk):
            return [download.fetch]
        self._download, self._attempts = None, self._attempts + 1
        if state is None:
            return self._on_program()
        state.round = chunk.round  # as the server says; `work` checks it by the order's hash
        return []

    def _on_program(self) -> list[Message]:
        welcome, program = self.welcome, b"".join(self._chunks)
        assert welcome is not None
        self._chunks = []
        if program_hash(program) == welcome.program_hash:
            self._load_program(welcome, program)
            return self._ready()
        if self._attempts == _PROGRAM_ATTEMPTS:
            raise ProgramError(
                f"the program arrived {_PROGRAM_ATTEMPTS} times, each time damaged: it has another hash than the "
                "server says; check the server's files and the way to it"
            )
        self._fetch_program(welcome)
        return [Fetch(welcome.run, PROGRAM, 0, 0)]

    def _fetch_state(self, order: OrderMessage, state: RunState) -> list[Message]:
        if self._attempts == _STATE_ATTEMPTS:
            self._order = None
            return self._refuse("damaged state", f"round {order.round}: the state does not match its hash")
        total = 4 * len(state.values) * (1 + len(state.vectors))
        self._download = _Download(Fetch(order.run, STATE, order.round - 1, 0), total)
        return [self._download.fetch]

    # Orders.

    def _on_order(self, order: OrderMessage) -> list[Message]:
        if self.welcome is None or order.run != self.welcome.run:
            return self._refuse("foreign run")
        if order.device != self.welcome.device:
            return self._refuse("foreign device")
        if self.worker is None:
            return self._refuse("not ready")
        if order.round < self._latest_round:
            return self._refuse("stale order")
        bare = order._replace(updates=())
        if self._answered is not None and self._answered[0] == bare:
            self._unacknowledged = _Request(self._answered[1])
            self._mark_resent()
            return [self._answered[1]]
        if self._order is not None and self._order._replace(updates=()) == bare:
            return [] if self._download is None else [self._download.fetch]
        fault = _fault(order, self.worker)
        if fault is not None:
            return self._refuse("impossible order", f"round {order.round}: refused: {fault}")
        self._order, self._latest_round, self._download, self._attempts = order, order.round, None, 0
        self._unacknowledged = None
        return []

    def _mark_resent(self) -> None:
        assert self._answered is not None
        self._resent_round = self._answered[1].round

    def _on_ack(self, ack: Ack) -> list[Message]:
        if ack.run != self.run:
            return self._refuse("foreign run")
        if self._answered is not None and self._answered[1].round == ack.round:
            self._unacknowledged = None
            if not ack.refused:
                self._counted_traffic = self._answered_traffic
        # Of an answer that was sent twice, the first may count, and this be about the second.
        if not (ack.refused and ack.round == self._resent_round):
            self.last_ack = ack
        return []

    def _refuse(self, reason: str, line: str = "") -> list[Message]:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if line:
            self._say(line)
        return []


class _Request:
    """A message that expects an answer: resent after a timeout, which doubles each time."""

    __slots__ = ("_due", "_wait", "message", "retries")

    def __init__(self, message: Message, wait: float = _FIRST_RETRY) -> None:
        self.message, self.retries = message, 0
        self._wait, self._due = wait, 0.0

    def is_due(self, now: float) -> bool:
        # It was sent shortly before the first look at a clock.
        due = bool(self._due) and now >= self._due
        if due:
            self.retries += 1
            self._wait = min(2 * self._wait, _LONGEST_RETRY)
        if due or not self._due:
            self._due = now + self._wait
        return due


class _Download:
    """A program or a state that comes piece by piece, each asked for when the one before it is here."""

    __slots__ = ("_total", "request")

    def __init__(self, fetch: Fetch, total: int) -> None:
        self.request, self._total = _Request(fetch), total

    @property
    def fetch(self) -> Fetch:
        """The piece that is asked for."""
        assert isinstance(self.request.message, Fetch)
        return self.request.message

    def expects(self, chunk: Chunk) -> bool:
        """Whether this is the piece that was asked for."""
        return chunk[:4] == self.fetch and len(chunk.data) == min(CHUNK, self._total - chunk.offset)

    def advance(self, chunk: Chunk) -> bool:
        """Go on to the next piece; returns whether this was the last."""
        end = chunk.offset + len(chunk.data)
        self.request = _Request(self.fetch._replace(offset=end))
        return end == self._total


def _fault(order: OrderMessage, worker: Worker) -> str | None:
    """Why this device cannot follow an order."""
    if order.k * order.local_steps > MAX_DIRECTIONS:
        return f"{order.k} x {order.local_steps} loss differences, a reply holds {MAX_DIRECTIONS}"
    if order.bits < 32 and order.local_steps > 1:
        return f"{order.bits} bits with {order.local_steps} local steps, which the server could not replay"
    values, n_live = sum(block.values for block in order.blocks), worker.program.n_live
    if order.blocks and values != n_live:
        return f"blocks of {values} values, the program has {n_live}"
    try:
        worker.reserve(Order.of(order))
    except (OrderError, BudgetError) as error:
        return str(error)
    return None

"""The messages between server and devices as CBOR (`docs/protocol.md`). Standard library and cbor2 only.

A message is a CBOR array: its version, its type, then its fields in the order of the classes below. Vectors of numbers
travel as byte strings of little-endian float32, so a reply of K = 50 loss differences takes some 240 bytes; packed in
one bit each, some 50.
Named tuples rather than dataclasses, which would cost a device 1.1 MB.
"""

from __future__ import annotations

import hashlib
from array import array
from functools import lru_cache
from math import isfinite
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, NamedTuple

import cbor2

from foreseed.engine.blocks import Block, probed
from foreseed.engine.errors import ForeseedError
from foreseed.engine.types import BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foreseed.engine.types import Buffer

    Check = Callable[[Any], Any]

VERSION = 4
MAX_DIRECTIONS = 1 << 16
MAX_BLOCKS = 64
MAX_VALUES = 1 << 26
MAX_MESSAGE = 1 << 19
"""Longer ones are refused unread: a device must know how much memory it needs."""
CHUNK = 1 << 14
"""Bytes of a program or a state that go into one message."""
PROGRAM, STATE = 0, 1
"""What can be fetched."""
RUN_TAG = 4
"""Bytes of a run's name in a reply: a device sends one in every round, and so many tell runs apart."""
NAMES = "1 to 64 letters, digits, dots, dashes and underscores, and a letter or digit first"
"""What a device may be called."""
ANY_NUMBER = -1
NOTHING_HELD = -1


class WireError(ForeseedError):
    """A message that is not what the protocol says; it changes nothing."""


class VersionError(WireError):
    """A message of another version than ours."""


class Update(NamedTuple):
    """One round of the update log: all that it takes to go from one round's values to the next's."""

    round: int
    step: bytes
    """Float32 constants of the optimiser: sgd (lr, momentum, decay) or adam (lr, beta1, beta2, eps, decay, k1, k2)."""
    parts: tuple[tuple[int, bytes], ...]
    """Device and float32 coefficients of its directions, in the order in which they are added."""


class OrderMessage(NamedTuple):
    """Server to device: answer this round."""

    run: bytes
    round: int
    device: int
    seed: int
    k: int
    sigma: float
    rademacher: bool
    shared: bool
    spread: int
    central: bool
    local_steps: int
    local_lr: float
    bits: int
    """Of a loss difference in the reply: 32, or packed in 1, 2, 4 or 8."""
    values_hash: bytes
    """Of the values to probe at, those after round - 1."""
    updates: tuple[Update, ...] = ()
    """What the device missed; where they do not lead to the values, it fetches the state."""
    blocks: tuple[Block, ...] = ()
    """Where directions perturb some layers each: k is then all of them together, and spread is 1."""

    @property
    def probed(self) -> tuple[Block, ...]:
        """The blocks, or the one that they are where nothing is said of them."""
        return probed(self.blocks, self.k, self.spread)


class Reply(NamedTuple):
    """Device to server: the base loss and the loss differences, and what they cost."""

    run: bytes
    """The first RUN_TAG bytes of its name."""
    round: int
    device: int
    samples: int
    losses: bytes
    """Float32 mean base loss; then a float32 difference per direction, or a float32 scale per block and their codes."""
    stats: bytes = b""
    """Float32 batch-norm statistics of the local images; empty without BatchNorm."""
    compute_ms: int = 0
    """Time spent on the answer; this and the rest are 0 in a simulation."""
    peak_kib: int = 0
    """Most memory that the device's process has held."""
    sent: int = 0
    """Bytes on the device's socket, up and, as `received`, down, since the last reply that it knows to count."""
    received: int = 0

    @property
    def base_loss(self) -> float:
        return array("f", self.losses[:4])[0]


class Announce(NamedTuple):
    """Server to all, retained: this run is on; whoever reads it joins anew."""

    run: bytes
    epoch: bytes
    """Drawn each time a server starts."""
    finished: bool


class Presence(NamedTuple):
    """Device to server, retained, and as a last will: this process of the device is here, or gone."""

    instance: bytes
    here: bool


class Join(NamedTuple):
    """Device to server: which run is this, and who am I in it?"""

    wanted: int
    """The number that the device should have in the run, or ANY_NUMBER."""


class Welcome(NamedTuple):
    """Server to device: what it takes to take part."""

    run: bytes
    device: int
    program_hash: bytes
    program_bytes: int
    batch: int
    """Images of a BatchNorm batch; 0 = as many at a time as the device likes."""
    vectors: int
    """How many of the optimiser's vectors devices keep, to replay updates."""


class Ready(NamedTuple):
    """Device to server: program here and checked, waiting for orders."""

    run: bytes
    held: int
    """The round whose values the device holds, or NOTHING_HELD."""
    samples: int


class Fetch(NamedTuple):
    """Device to server: the bytes from an offset on, please."""

    run: bytes
    what: int
    """PROGRAM or STATE: the values, then the optimiser's vectors that devices keep."""
    round: int
    """The round after which the state is wanted; 0 for the program."""
    offset: int


class Chunk(NamedTuple):
    """Server to device: the bytes asked for, CHUNK of them or what is left."""

    run: bytes
    what: int
    round: int
    offset: int
    data: bytes


class Ack(NamedTuple):
    """Server to device: a reply arrived, and counts, or why it does not."""

    run: bytes
    round: int
    refused: str


class Leave(NamedTuple):
    """Server to device: you cannot take part, and why."""

    reason: str


Message = OrderMessage | Reply | Update | Announce | Presence | Join | Welcome | Ready | Fetch | Chunk | Ack | Leave


def values_hash(values: Buffer) -> bytes:
    """Eight bytes that tell two vectors of values apart."""
    return hashlib.blake2b(values, digest_size=8).digest()


def program_hash(program: Buffer) -> bytes:
    """Sixteen bytes that tell two programs apart."""
    return hashlib.blake2b(program, digest_size=16).digest()


def is_name(name: str) -> bool:
    """Whether a device may be called that, see NAMES."""
    plain = name.translate(dict.fromkeys(map(ord, "._-")))
    return name.isascii() and 0 < len(name) <= 64 and name[0] not in "._-" and plain.isalnum()


def encode(message: Message) -> bytes:
    """The message's bytes."""
    return cbor2.dumps((VERSION, _NUMBERS[type(message)], *message))


def decode(data: bytes, *expected: type[Message], limit: int = MAX_MESSAGE) -> Message:
    """The message in these bytes, every field checked; WireError says what is wrong with it.

    With types `expected`, any other is wrong too.
    """
    if len(data) > limit:
        raise WireError(f"a message of {len(data)} bytes, the most is {limit}")
    try:
        items = cbor2.loads(data, semantic_decoders=_NO_TAGS, max_depth=_DEPTH, allow_indefinite=False)
    except Exception as error:  # the decoder has many ways to say that the bytes are not CBOR
        raise WireError(f"not CBOR of ours: {type(error).__name__}") from None
    if not isinstance(items, list) or len(items) < 2:
        raise WireError(f"a message is an array of its version, its type and its fields, not {shown(items)}")
    known = type(items[1]) is int and items[1] in _TYPES
    if items[0] != VERSION:
        # Users are told of another version, so noise must not be taken for one.
        wrong = VersionError if known and type(items[0]) is int else WireError
        raise wrong(f"message version {shown(items[0])}, this foreseed speaks {VERSION}")
    if not known:
        raise WireError(f"message type {shown(items[1])}, expected one of {list(_TYPES)}")
    try:
        kind, checks = _TYPES[items[1]]
        message: Message = kind(*_fields(items[2:], checks))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"malformed message: {error}") from None
    # A message has one encoding: nothing follows it, and nothing in it only looks like what it should be.
    if encode(message) != data:
        raise WireError("malformed message: its fields are fine, their encoding is not")
    if expected and not isinstance(message, expected):
        raise WireError(f"{type(message).__name__} from a side that does not send it")
    return message


@lru_cache(64)
def transfer_bytes(what: int, round: int, total: int) -> tuple[int, int]:
    """Bytes up and down of fetching a program or a state in chunks."""
    up = down = 0
    for offset in range(0, total, CHUNK):
        data = bytes(min(CHUNK, total - offset))
        up += len(encode(Fetch(bytes(8), what, round, offset)))
        down += len(encode(Chunk(bytes(8), what, round, offset, data)))
    return up, down


class _NoTags(dict[int, Any]):
    """Refuses every CBOR tag: messages have none, and a decimal of 200 kB alone keeps the decoder busy for 10 s."""

    def __missing__(self, tag: int) -> Any:
        raise ValueError(f"tag {tag}")


_NO_TAGS = _NoTags()
_DEPTH = 5
"""An order's updates are the deepest: message, updates, update, parts, part."""


# A check gives back a field as it is in the message, or raises ValueError.


def _fields(items: Any, checks: Sequence[Check]) -> list[Any]:
    if len(_list(items)) != len(checks):
        raise ValueError(f"{len(items)} fields, expected {len(checks)}")
    return [check(item) for check, item in zip(checks, items, strict=True)]


def _updates(x: Any) -> tuple[Update, ...]:
    return tuple(Update(*_fields(update, _UPDATE)) for update in _list(x))


def _blocks(x: Any) -> tuple[Block, ...]:
    if len(_list(x)) > MAX_BLOCKS:
        raise ValueError(f"{len(x)} blocks, the most is {MAX_BLOCKS}")
    return tuple(Block(*_fields(block, _BLOCK)) for block in x)


def _parts(x: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(_fields(part, _PART)) for part in _list(x))


def _step(x: Any) -> bytes:
    step: bytes = _floats(7, 3)(x)
    if len(step) not in (12, 28):
        raise ValueError(f"an optimiser step of {len(step) // 4} constants")
    return step


def _list(x: Any) -> list[Any]:
    if type(x) is not list:
        raise ValueError(f"{shown(x)} is not an array")
    return x


def _bool(x: Any) -> bool:
    if type(x) is not bool:
        raise ValueError(f"{shown(x)} is neither true nor false")
    return x


def _float(x: Any) -> float:
    if type(x) is not float or not isfinite(x):
        raise ValueError(f"{shown(x)} is not a finite number")
    return x


def _text(x: Any) -> str:
    if type(x) is not str or len(x) > 300 or not x.isprintable():
        raise ValueError(f"{shown(x)} is not a line of at most 300 characters")
    return x


def _int(most: int = 0xFFFFFFFF, least: int = 0) -> Check:
    def check(x: Any) -> int:
        if type(x) is not int or not least <= x <= most:
            raise ValueError(f"{shown(x)} is not an integer from {least} to {most}")
        return x

    return check


def _bytes(most: int, least: int) -> Check:
    def check(x: Any) -> bytes:
        if type(x) is not bytes or not least <= len(x) <= most:
            raise ValueError(f"expected {least} to {most} bytes")
        return x

    return check


def _floats(most: int, least: int = 0) -> Check:
    read = _bytes(4 * most, 4 * least)

    def check(x: Any) -> bytes:
        raw: bytes = read(x)
        if len(raw) % 4:
            raise ValueError(f"{len(raw)} bytes are not float32 numbers")
        if not all(map(isfinite, array("f", raw))):
            raise ValueError("a number is not finite")
        return raw

    return check


def _bits(x: Any) -> int:
    if type(x) is not int or x not in BITS:
        raise ValueError(f"{shown(x)} is not one of {', '.join(map(str, BITS))}")
    return x


# Whether a reply's numbers are finite, the server finds out: what it refuses, it can answer.


def _stats(x: Any) -> bytes:
    raw: bytes = _bytes(4 * MAX_VALUES, 0)(x)
    if len(raw) % 4:
        raise ValueError(f"{len(raw)} bytes are not float32 numbers")
    return raw


_U32, _U62, _ID, _K, _SAMPLES = _int(), _int(1 << 62), _bytes(8, 8), _int(MAX_DIRECTIONS, 1), _int(1 << 31, 1)
_PART = (_U32, _floats(MAX_DIRECTIONS, 1))
_UPDATE = (_U32, _step, _parts)
_BLOCK = (_int(MAX_VALUES, 1), _K, _K)
_ORDER = (
    _ID, _U32, _U32, _int((1 << 64) - 1), _K, _float, _bool, _bool, _K, _bool, _int(1 << 12, 1), _float, _bits, _ID,
    _updates, _blocks,
)  # fmt: skip
_REPLY = (
    _bytes(RUN_TAG, RUN_TAG), _U32, _U32, _SAMPLES, _bytes(4 * (MAX_DIRECTIONS + 1), 8), _stats, _U62, _U62, _U62, _U62,
)  # fmt: skip
_TYPES: dict[int, tuple[type[Message], tuple[Check, ...]]] = {
    1: (OrderMessage, _ORDER),
    2: (Reply, _REPLY),
    3: (Update, _UPDATE),
    4: (Announce, (_ID, _ID, _bool)),
    5: (Presence, (_bytes(4, 4), _bool)),
    6: (Join, (_int(0xFFFFFFFE, ANY_NUMBER),)),
    7: (Welcome, (_ID, _int(0xFFFFFFFE), _bytes(16, 16), _int(least=1), _U32, _int(2))),
    8: (Ready, (_ID, _int(least=NOTHING_HELD), _SAMPLES)),
    9: (Fetch, (_ID, _int(STATE), _U32, _U32)),
    10: (Chunk, (_ID, _int(STATE), _U32, _U32, _bytes(CHUNK, 1))),
    11: (Ack, (_ID, _U32, _text)),
    12: (Leave, (_text,)),
}
_NUMBERS = {kind: number for number, (kind, _) in _TYPES.items()}

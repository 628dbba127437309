"""Orders, replies and the update log as CBOR (`docs/protocol.md`). Standard library and cbor2 only.

A message is a CBOR array that starts with its version and type. Vectors of numbers travel as byte strings of
little-endian float32, so a reply of K = 50 loss differences takes some 240 bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from reprlib import repr as shown
from typing import Any

import cbor2

from foreseed.engine.errors import ForeseedError
from foreseed.engine.types import Buffer

VERSION = 1
MAX_DIRECTIONS = 1 << 16
MAX_VALUES = 1 << 26


class WireError(ForeseedError):
    """A message that is not what the protocol says; it changes nothing."""


@dataclass(frozen=True)
class Update:
    """One round of the update log: all that it takes to go from one round's values to the next's."""

    round: int
    step: bytes
    """Float32 constants of the optimiser: sgd (lr, momentum, decay) or adam (lr, beta1, beta2, eps, decay, k1, k2)."""
    parts: tuple[tuple[int, bytes], ...]
    """Device and float32 coefficients of its directions, in the order in which they are added."""


@dataclass(frozen=True)
class CatchUp:
    """What brings a device up to date: the state itself, or the updates that it missed."""

    state: bytes = b""
    """Values, and for a device that replays also the optimiser's vectors, as float32."""
    updates: tuple[Update, ...] = ()


@dataclass(frozen=True)
class OrderMessage:
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
    values_hash: bytes
    catch_up: CatchUp


@dataclass(frozen=True)
class Reply:
    """Device to server: the base loss and the loss differences."""

    run: bytes
    round: int
    device: int
    samples: int
    losses: bytes
    """Float32: the mean base loss, then one loss difference per direction."""
    forward_passes: int
    stats: bytes = b""
    """Float32 batch-norm statistics of the local images; empty without BatchNorm."""

    @property
    def base_loss(self) -> float:
        return array("f", self.losses[:4])[0]

    @property
    def differences(self) -> array[float]:
        return array("f", self.losses[4:])


Message = OrderMessage | Reply | Update
_NUMBERS: dict[type[Message], int] = {OrderMessage: 1, Reply: 2, Update: 3}


def values_hash(values: Buffer) -> bytes:
    """Eight bytes that tell two vectors of values apart."""
    return hashlib.blake2b(values, digest_size=8).digest()


def encode(message: Message) -> bytes:
    """The message's bytes."""
    return cbor2.dumps((VERSION, _NUMBERS[type(message)], *_plain(message)))


def _plain(item: Message | CatchUp) -> list[Any]:
    """The fields, with messages inside as their own fields (`dataclasses.astuple` copies every byte of them)."""
    return [
        _plain(field) if isinstance(field, CatchUp)
        else [_plain(update) for update in field] if isinstance(item, CatchUp) and isinstance(field, tuple)
        else field
        for field in vars(item).values()
    ]  # fmt: skip


def decode(data: bytes) -> Message:
    """The message in these bytes, every field checked; WireError says what is wrong with it."""
    try:
        items = cbor2.loads(data, semantic_decoders=_NO_TAGS, max_depth=_DEPTH, allow_indefinite=False)
    except Exception as error:  # the decoder has many ways to say that the bytes are not CBOR
        raise WireError(f"not CBOR of ours: {type(error).__name__}") from None
    if not isinstance(items, list) or len(items) < 2:
        raise WireError(f"a message is an array of its version, its type and its fields, not {shown(items)}")
    if items[0] != VERSION:
        raise WireError(f"message version {shown(items[0])}, this foreseed speaks {VERSION}")
    if items[1] not in list(_READERS):
        raise WireError(f"message type {shown(items[1])}, expected one of {list(_READERS)}")
    try:
        message = _READERS[items[1]](items[2:])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"malformed message: {error}") from None
    # A message has one encoding: nothing follows it, and nothing in it only looks like what it should be.
    if encode(message) != data:
        raise WireError("malformed message: its fields are fine, their encoding is not")
    return message


class _NoTags(dict[int, Any]):
    """Refuses every CBOR tag: messages have none, and a decimal of 200 kB alone keeps the decoder busy for 10 s."""

    def __missing__(self, tag: int) -> Any:
        raise ValueError(f"tag {tag}")


_NO_TAGS = _NoTags()
_DEPTH = 6
"""An order's catch-up is the deepest: message, catch-up, updates, update, parts, part."""


def _order(f: list[Any]) -> OrderMessage:
    _length(f, 14)
    state, updates = f[13]
    return OrderMessage(
        _bytes(f[0], 8, 8), _int(f[1]), _int(f[2]), _int(f[3], (1 << 64) - 1), _int(f[4], MAX_DIRECTIONS, 1),
        _float(f[5]), _bool(f[6]), _bool(f[7]), _int(f[8], MAX_DIRECTIONS, 1), _bool(f[9]), _int(f[10], 1 << 12, 1),
        _float(f[11]), _bytes(f[12], 8, 8), CatchUp(_floats(state, 3 * MAX_VALUES), tuple(_update(u) for u in updates)),
    )  # fmt: skip


def _reply(f: list[Any]) -> Reply:
    _length(f, 7)
    losses = _floats(f[4], MAX_DIRECTIONS + 1, 2)
    return Reply(
        _bytes(f[0], 8, 8), _int(f[1]), _int(f[2]), _int(f[3], 1 << 31, 1), losses, _int(f[5], 1 << 62),
        _floats(f[6], MAX_VALUES),
    )  # fmt: skip


def _update(f: list[Any]) -> Update:
    _length(f, 3)
    step = _floats(f[1], 7, 3)
    if len(step) not in (12, 28):
        raise ValueError(f"an optimiser step of {len(step) // 4} constants")
    parts = tuple((_int(device), _floats(c, MAX_DIRECTIONS, 1)) for device, c in f[2])
    return Update(_int(f[0]), step, parts)


def _length(fields: list[Any], n: int) -> None:
    if len(fields) != n:
        raise ValueError(f"{len(fields)} fields, expected {n}")


def _int(x: Any, most: int = 0xFFFFFFFF, least: int = 0) -> int:
    if type(x) is not int or not least <= x <= most:
        raise ValueError(f"{shown(x)} is not an integer from {least} to {most}")
    return x


def _bool(x: Any) -> bool:
    if type(x) is not bool:
        raise ValueError(f"{shown(x)} is neither true nor false")
    return x


def _float(x: Any) -> float:
    if type(x) is not float or not isfinite(x):
        raise ValueError(f"{shown(x)} is not a finite number")
    return x


def _bytes(x: Any, most: int, least: int = 0) -> bytes:
    if type(x) is not bytes or not least <= len(x) <= most:
        raise ValueError(f"expected {least} to {most} bytes")
    return x


def _floats(x: Any, most: int, least: int = 0) -> bytes:
    raw = _bytes(x, 4 * most, 4 * least)
    if len(raw) % 4:
        raise ValueError(f"{len(raw)} bytes are not float32 numbers")
    if not all(map(isfinite, array("f", raw))):
        raise ValueError("a number is not finite")
    return raw


_READERS: dict[int, Callable[[list[Any]], Message]] = {1: _order, 2: _reply, 3: _update}

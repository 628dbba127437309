"""Messages: what goes in comes out, and what is not a message is a WireError and nothing else."""

from __future__ import annotations

import operator
import struct
import time
import tracemalloc
from array import array
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.engine import quantise
from foreseed.engine.blocks import Block
from foreseed.engine.types import BITS
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
    Message,
    OrderMessage,
    Presence,
    Ready,
    Reply,
    Update,
    VersionError,
    Welcome,
    WireError,
    decode,
    encode,
    program_hash,
    transfer_bytes,
    values_hash,
)
from foreseed.wire.messages import MAX_DIRECTIONS, MAX_MESSAGE, VERSION

words = st.integers(0, 2**32 - 1)
four, eight = st.binary(min_size=4, max_size=4), st.binary(min_size=8, max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)


def floats(least: int = 0, most: int = 20) -> st.SearchStrategy[bytes]:
    number = st.floats(allow_nan=False, allow_infinity=False, width=32)
    return st.lists(number, min_size=least, max_size=most).map(lambda xs: array("f", xs).tobytes())


updates = st.builds(
    Update,
    words,
    st.sampled_from([3, 7]).flatmap(lambda n: floats(n, n)),
    st.lists(st.tuples(words, floats(1)), max_size=4).map(tuple),
)
blocks = st.builds(Block, st.integers(1, 2**26), st.integers(1, MAX_DIRECTIONS), st.integers(1, MAX_DIRECTIONS))
orders = st.builds(
    OrderMessage, eight, words, words, st.integers(0, 2**64 - 1), st.integers(1, MAX_DIRECTIONS), numbers,
    st.booleans(), st.booleans(), st.integers(1, MAX_DIRECTIONS), st.booleans(), st.integers(1, 4096), numbers,
    st.sampled_from(BITS), eight, st.lists(updates, max_size=3).map(tuple), st.lists(blocks, max_size=3).map(tuple),
)  # fmt: skip
counters = st.integers(0, 2**62)
samples = st.integers(1, 2**31)
losses = floats(2) | st.builds(operator.add, floats(2, 2), st.binary(min_size=1, max_size=30))
replies = st.builds(Reply, four, words, words, samples, losses, floats(), counters, counters, counters, counters)
lines = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=300)
parts = st.sampled_from([PROGRAM, STATE])
device_numbers = st.integers(0, 2**32 - 2)
short = [
    st.builds(Announce, eight, eight, st.booleans()),
    st.builds(Presence, four, st.booleans()),
    st.builds(Join, st.just(ANY_NUMBER) | device_numbers),
    st.builds(
        Welcome, eight, device_numbers, st.binary(min_size=16, max_size=16), st.integers(1, 2**32 - 1), words,
        st.integers(0, 2),
    ),
    st.builds(Ready, eight, st.just(NOTHING_HELD) | words, samples),
    st.builds(Fetch, eight, parts, words, words),
    st.builds(Chunk, eight, parts, words, words, st.binary(min_size=1, max_size=100)),
    st.builds(Ack, eight, words, lines),
    st.builds(Leave, lines),
]  # fmt: skip
messages: st.SearchStrategy[Message] = st.one_of(orders, replies, updates, *short)


def numbers_of(*xs: float) -> bytes:
    return array("f", xs).tobytes()


UPDATE = Update(7, numbers_of(0.01, 0.9, 0.0), ((3, numbers_of(1, 2)), (5, numbers_of(3, 4))))
ORDER = OrderMessage(b"run-name", 8, 3, 12345, 50, 1e-4, False, True, 2, False, 1, 0.01, 32, b"hashhash", (UPDATE,))
REPLY = Reply(b"run-", 8, 3, 812, numbers_of(2.3, *range(50)), b"", 950, 21_000, 700, 28_000)
WELCOME = Welcome(b"run-name", 3, bytes(range(16)), 70_000, 0, 1)
CHUNK_OF_STATE = Chunk(b"run-name", STATE, 7, CHUNK, b"bytes")
ONE_OF_EACH: tuple[Message, ...] = (
    ORDER, REPLY, UPDATE, Announce(b"run-name", b"an-epoch", False), Presence(b"inst", True), Join(ANY_NUMBER), WELCOME,
    Ready(b"run-name", NOTHING_HELD, 812), Fetch(b"run-name", STATE, 7, CHUNK), CHUNK_OF_STATE,
    Ack(b"run-name", 8, "duplicate"), Leave("the run is full"),
)  # fmt: skip
NUMBERS = {type(message): number for number, message in enumerate(ONE_OF_EACH, 1)}


def fields(message: Message, **changes: Any) -> list[Any]:
    """The message as plain CBOR items, some fields replaced by anything at all."""
    return [VERSION, NUMBERS[type(message)], *(message._asdict() | changes).values()]


def refused(data: bytes, match: str | None = None) -> None:
    with pytest.raises(WireError, match=match):
        decode(data)


# --- what is a message ---


@given(messages)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


def test_reply_of_50_directions_takes_at_most_250_bytes() -> None:
    largest = 2**32 - 1
    reply = Reply(
        b"\xff" * 4, largest, largest, 2**31, numbers_of(*[-1.5] * 51), b"", largest, largest, largest, largest
    )
    assert decode(encode(reply)) == reply
    assert len(encode(reply)) <= 250
    assert len(encode(REPLY)) <= 240


def test_layout_is_an_array_of_version_type_and_fields() -> None:
    losses = struct.pack("<51f", 2.3, *range(50))
    expected = [4, 2, b"run-", 8, 3, 812, losses, b"", 950, 21_000, 700, 28_000]
    assert cbor2.loads(encode(REPLY)) == expected
    assert [cbor2.loads(encode(message))[:2] for message in ONE_OF_EACH] == [[4, number] for number in range(1, 13)]


def test_losses_begin_with_the_base_loss() -> None:
    assert REPLY.base_loss == pytest.approx(2.3)


def test_reply_of_1600_directions_in_one_bit_each_takes_at_most_240_bytes() -> None:
    signs = array("f", [(-1) ** (i * i % 7) * 1e-3 for i in range(1600)])
    scale, codes = quantise(signs, 1, 5, 8, 3)
    most = 2**16 - 1
    reply = Reply(b"\xff" * 4, most, most, most, numbers_of(2.3, scale) + codes, b"", most, most, most, most)
    assert decode(encode(reply)) == reply
    assert len(reply.losses) == 208
    assert len(encode(reply)) <= 240


def test_hash_tells_vectors_apart_and_is_the_same_for_any_buffer() -> None:
    values = array("f", [1.0, 2.0, -0.0])
    assert values_hash(values) == values_hash(values.tobytes()) == values_hash(memoryview(values))
    assert len(values_hash(values)) == 8
    assert values_hash(values) != values_hash(array("f", [1.0, 2.0, 0.0]))
    assert len(program_hash(b"program")) == 16
    assert program_hash(b"program") == program_hash(bytearray(b"program")) != program_hash(b"programs")


def test_hashes_are_those_that_the_protocol_names() -> None:
    # BLAKE2b of "abc", as `b2sum -l 64` and `b2sum -l 128` give it.
    assert values_hash(b"abc").hex() == "d8bb14d833d59559"
    assert program_hash(b"abc").hex() == "cf4ab791c62b8d2b2109c90275287816"


@pytest.mark.parametrize("total", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7])
def test_transfer_bytes_are_those_of_the_messages_that_it_takes(total: int) -> None:
    up = down = 0
    for offset in range(0, total, CHUNK):
        up += len(encode(Fetch(b"run-name", STATE, 300, offset)))
        down += len(encode(Chunk(b"run-name", STATE, 300, offset, bytes(CHUNK)[: total - offset])))
    assert transfer_bytes(STATE, 300, total) == (up, down)


def test_only_the_types_that_a_side_expects_are_taken() -> None:
    assert decode(encode(REPLY), Join, Reply) == REPLY
    with pytest.raises(WireError, match="OrderMessage from a side that does not send it"):
        decode(encode(ORDER), Join, Reply)


def test_a_message_longer_than_the_limit_is_refused_unread() -> None:
    data = encode(REPLY)
    assert decode(data, limit=len(data)) == REPLY
    with pytest.raises(WireError, match=f"a message of {len(data)} bytes, the most is {len(data) - 1}"):
        decode(data, limit=len(data) - 1)
    refused(bytes(MAX_MESSAGE + 1), f"the most is {MAX_MESSAGE}")


# --- what is not ---

NAN, INF = numbers_of(1, float("nan")), numbers_of(float("inf"), 1)


@pytest.mark.parametrize(
    ("message", "changes", "match"),
    [
        (REPLY, {"run": b"run-name"}, "4 to 4 bytes"),
        (REPLY, {"run": "run-"}, "4 to 4 bytes"),
        (REPLY, {"round": -1}, "-1 is not an integer"),
        (REPLY, {"round": 2**32}, "is not an integer from 0 to"),
        (REPLY, {"round": 8.0}, "8.0 is not an integer"),
        (REPLY, {"round": True}, "True is not an integer"),
        (REPLY, {"device": None}, "None is not an integer"),
        (REPLY, {"device": 2**200}, "not CBOR of ours"),
        (REPLY, {"samples": 0}, "0 is not an integer from 1"),
        (REPLY, {"samples": 2**40}, "is not an integer from 1"),
        (REPLY, {"losses": numbers_of(2.3)}, "8 to"),
        (REPLY, {"losses": bytes(4 * MAX_DIRECTIONS + 8)}, "8 to 262148 bytes"),
        (REPLY, {"losses": [2.3, 1.0]}, "bytes"),
        (REPLY, {"sent": -5}, "-5 is not an integer"),
        (REPLY, {"stats": b"123"}, "3 bytes are not float32"),
        (ORDER, {"seed": 2**64}, "not CBOR of ours"),
        (ORDER, {"k": 0}, "0 is not an integer from 1"),
        (ORDER, {"k": MAX_DIRECTIONS + 1}, "is not an integer from 1 to 65536"),
        (ORDER, {"sigma": float("nan")}, "nan is not a finite number"),
        (ORDER, {"sigma": float("-inf")}, "-inf is not a finite number"),
        (ORDER, {"sigma": 1}, "1 is not a finite number"),
        (ORDER, {"rademacher": 1}, "1 is neither true nor false"),
        (ORDER, {"spread": 0}, "0 is not an integer from 1"),
        (ORDER, {"local_steps": 4097}, "4097 is not an integer from 1 to 4096"),
        (ORDER, {"bits": 16}, "16 is not one of 1, 2, 4, 8, 32"),
        (ORDER, {"bits": True}, "True is not one of"),
        (ORDER, {"bits": 32.0}, "32.0 is not one of"),
        (ORDER, {"values_hash": b""}, "8 to 8 bytes"),
        (ORDER, {"updates": None}, "None is not an array"),
        (ORDER, {"blocks": None}, "None is not an array"),
        (ORDER, {"blocks": [[0, 5, 1]]}, "0 is not an integer from 1"),
        (ORDER, {"blocks": [[9, 5]]}, "2 fields, expected 3"),
        (ORDER, {"blocks": [[9, 5, 1]] * 65}, "65 blocks, the most is 64"),
        (ORDER, {"updates": 7}, "7 is not an array"),
        (ORDER, {"updates": ""}, "is not an array"),
        (ORDER, {"updates": {}}, "is not an array"),
        (ORDER, {"updates": [7]}, "7 is not an array"),
        (ORDER, {"updates": [[1, 2]]}, "2 fields, expected 3"),
        (ORDER, {"updates": [[1, NAN + bytes(4), []]]}, "not finite"),
        (UPDATE, {"step": numbers_of(1, 2, 3, 4)}, "step of 4 constants"),
        (UPDATE, {"step": numbers_of(1, 2)}, "12 to 28 bytes"),
        (UPDATE, {"parts": [[1, b""]]}, "4 to"),
        (UPDATE, {"parts": [[1, INF]]}, "not finite"),
        (UPDATE, {"parts": [[1]]}, "1 fields, expected 2"),
        (UPDATE, {"parts": [b"12"]}, "is not an array"),
        (UPDATE, {"parts": [[-1, numbers_of(1)]]}, "-1 is not an integer"),
        (UPDATE, {"parts": {}}, "is not an array"),
        (REPLY, {"compute_ms": -1}, "-1 is not an integer"),
        (REPLY, {"received": 2**62 + 1}, "is not an integer from 0 to"),
        (Announce(b"run-name", b"an-epoch", False), {"epoch": b"short"}, "8 to 8 bytes"),
        (Announce(b"run-name", b"an-epoch", False), {"finished": 0}, "0 is neither true nor false"),
        (Presence(b"inst", True), {"instance": b"instance"}, "4 to 4 bytes"),
        (Presence(b"inst", True), {"here": None}, "None is neither"),
        (Join(0), {"wanted": -2}, "-2 is not an integer from -1"),
        (Join(0), {"wanted": 2**32 - 1}, "is not an integer from -1 to 4294967294"),
        (WELCOME, {"device": 2**32 - 1}, "is not an integer from 0 to 4294967294"),
        (WELCOME, {"program_hash": b"hashhash"}, "16 to 16 bytes"),
        (WELCOME, {"program_bytes": 0}, "0 is not an integer from 1"),
        (WELCOME, {"vectors": 3}, "3 is not an integer from 0 to 2"),
        (Ready(b"run-name", 0, 1), {"held": -2}, "-2 is not an integer from -1"),
        (Ready(b"run-name", 0, 1), {"samples": 0}, "0 is not an integer from 1"),
        (Fetch(b"run-name", STATE, 7, 0), {"what": 2}, "2 is not an integer from 0 to 1"),
        (Fetch(b"run-name", STATE, 7, 0), {"offset": -1}, "-1 is not an integer"),
        (CHUNK_OF_STATE, {"data": b""}, "1 to 16384 bytes"),
        (CHUNK_OF_STATE, {"data": bytes(CHUNK + 1)}, "1 to 16384 bytes"),
        (Ack(b"run-name", 8, ""), {"refused": None}, "None is not a line"),
        (Ack(b"run-name", 8, ""), {"refused": "two\nlines"}, "is not a line of at most 300"),
        (Leave(""), {"reason": "x" * 301}, "is not a line of at most 300"),
        (Leave(""), {"reason": b"bytes"}, "is not a line"),
    ],
)
def test_a_field_that_is_wrong_is_named(message: Message, changes: dict[str, Any], match: str) -> None:
    refused(cbor2.dumps(fields(message, **changes)), match)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_of_the_wrong_shape_is_refused(message: Message) -> None:
    whole = fields(message)
    refused(cbor2.dumps(whole[:-1]), "fields, expected")
    refused(cbor2.dumps([*whole, 0]), "fields, expected")
    with pytest.raises(VersionError, match="version 2, this foreseed speaks 4"):
        decode(cbor2.dumps([2, *whole[1:]]))
    refused(cbor2.dumps([VERSION, 13, *whole[2:]]), "type 13, expected one of")
    refused(cbor2.dumps([VERSION, [], *whole[2:]]), r"type \[\], expected one of")
    refused(cbor2.dumps([VERSION]), "a message is an array")
    refused(cbor2.dumps(dict(enumerate(whole))), "a message is an array")
    refused(b"", "not CBOR")


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_has_exactly_one_encoding(message: Message) -> None:
    data, whole = encode(message), fields(message)
    refused(data + b"\0", "encoding")
    refused(cbor2.dumps([True, *whole[1:]]), "version True")
    refused(cbor2.dumps([float(VERSION), *whole[1:]]), "encoding")
    refused(cbor2.dumps([VERSION, float(whole[1]), *whole[2:]]), r"type \d+\.0, expected one of")
    refused(b"\x98" + bytes([len(whole)]) + data[1:], "encoding")  # a length in two bytes that needs one
    refused(cbor2.dumps(whole, indefinite_containers=True), "not CBOR of ours")


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_cut_short_anywhere_is_refused(message: Message) -> None:
    data = encode(message)
    for end in range(len(data)):
        refused(data[:end])


# --- what is meant to hurt ---


def bounded(data: bytes) -> None:
    """Refused, in little time, and in memory that its own bytes account for."""
    tracemalloc.start()
    began = time.process_time()
    try:
        refused(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 2


BIG = b"\xc2\x5a\x00\x04\x00\x00" + b"\xff" * (1 << 18)  # a bignum of 256 kB


@pytest.mark.parametrize(
    "data",
    [
        b"\x81" * 100_000 + b"\x00",  # nested deeper than any stack
        b"\xa1\x00" * 100_000 + b"\x00",
        b"\xc1" * 100_000 + b"\x00",
        *(head + (1 << 62).to_bytes(8, "big") for head in (b"\x5b", b"\x7b", b"\x9b", b"\xbb")),  # 4 EB declared
        *(head + (1 << 31).to_bytes(4, "big") + b"\x01\x02" for head in (b"\x5a", b"\x7a", b"\x9a", b"\xba")),
        b"\x5f" + b"\x41a" * 1000,  # without end
        b"\xc4\x82\x00" + BIG,  # a decimal fraction whose digits take minutes
        b"\x82" + BIG + b"\x00",  # a version too long to print
        b"\x82\x01" + BIG,
        cbor2.dumps([VERSION, 2, "x" * 1_000_000]),
        # Lists that hold the list before them twice: 2^40 items, if one looks at all of them.
        b"\x82\x98\x29\xd8\x1c\x80" + b"".join(b"\xd8\x1c\x82" + 2 * (b"\xd8\x1d\x18" + bytes([i])) for i in range(40)),
        b"\xd8\x1c\x82\x01\xd8\x1d\x00",  # a list that holds itself
        cbor2.dumps([VERSION, 2, cbor2.CBORTag(35, "(" * 50_000)]),  # a regular expression
        cbor2.dumps([VERSION, *[[]] * 100_000]),
    ],
    ids=lambda data: data[:4].hex() + f"-{len(data)}",
)
def test_hostile_bytes_cost_little(data: bytes) -> None:
    bounded(data)


def test_a_fault_is_told_in_few_words() -> None:
    with pytest.raises(WireError) as caught:
        decode(cbor2.dumps(fields(REPLY, round="x" * 1_000_000)))
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)


leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.binary() | st.text()
anything = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner))


@given(anything)
def test_any_other_cbor_is_refused(item: Any) -> None:
    refused(cbor2.dumps(item))
    refused(cbor2.dumps([VERSION, 2, item]))


@given(messages, st.data())
def test_a_damaged_message_is_refused_or_another_whole_message(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "insert"]))
        byte = data.draw(st.binary(min_size=1, max_size=1))
        damaged[at : at + (change != "insert")] = b"" if change == "cut" and len(damaged) > 1 else byte
    try:
        found = decode(bytes(damaged))
    except WireError:
        return
    assert encode(found) == damaged


@settings(max_examples=30)
@given(messages, messages)
def test_messages_one_after_the_other_are_not_a_message(first: Message, second: Message) -> None:
    refused(encode(first) + encode(second))


def test_a_message_that_was_decoded_can_be_changed_and_sent_on() -> None:
    later = REPLY._replace(round=9)
    assert decode(encode(later)) == later != REPLY

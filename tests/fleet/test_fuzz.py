"""No bytes off the wire break either end (`python -m tests.fleet.fuzz` sends a million)."""

from __future__ import annotations

import pytest

from foreseed.device.member import Member
from foreseed.fleet.conductor import Conductor, Send
from foreseed.wire import Message
from tests.fleet.fuzz import fuzz


def test_fuzzed_messages_raise_nothing_and_change_nothing() -> None:
    happened = fuzz(20_000, seed=1)
    # The fuzzer gets past the codec: all these checks behind it were reached too.
    for reason in ("valid", "malformed", "foreign run", "wrong instance", "forged device number", "late"):
        assert happened[f"server: {reason}"]
    for reason in ("valid", "malformed", "foreign run", "foreign device", "not ready", "unexpected chunk"):
        assert happened[f"device: {reason}"]


def test_fuzzer_notices_a_server_that_lets_junk_change_something(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Conductor, reason: str) -> list[Send]:
        self.devices["a"].failures += 1
        return []

    monkeypatch.setattr(Conductor, "_refuse", refuse)
    with pytest.raises(AssertionError, match="changed something"):
        fuzz(500, seed=1)


def test_fuzzer_notices_a_device_that_lets_junk_change_something(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Member, reason: str, line: str = "") -> list[Message]:
        self.rejection = reason
        return []

    monkeypatch.setattr(Member, "_refuse", refuse)
    with pytest.raises(AssertionError, match="changed something"):
        fuzz(500, seed=1)

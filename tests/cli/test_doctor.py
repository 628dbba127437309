"""`foreseed doctor` says what is here and what is not."""

from __future__ import annotations

import json

import pytest

from foreseed import __version__
from foreseed.bench import machine
from foreseed.cli import main


def test_json_has_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "packages", "compilers", "memory_bytes"}
    assert found["machine"]["foreseed"] == __version__
    assert found["machine"]["instruction_set"] == machine.instruction_set()
    assert found["packages"]["torch"]
    assert {"gcc", "arm-none-eabi-gcc"} <= set(found["compilers"])
    assert found["memory_bytes"]["total"] >= found["memory_bytes"]["available"] > 0


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "instruction_set", lambda: None)
    monkeypatch.setattr(machine, "_PACKAGES", ("a-package-that-nobody-has",))
    monkeypatch.setattr(machine, "_COMPILERS", ("a-compiler-that-nobody-has",))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "not built" in out
    assert "not installed" in out
    assert "not found" in out

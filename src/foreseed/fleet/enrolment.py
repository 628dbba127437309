"""Who takes part in a run, under which number: a file that its owner writes before the first device joins."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from foreseed.config.toml import literal
from foreseed.engine import ForeseedError
from foreseed.engine.files import write_whole
from foreseed.wire import NAMES, is_name

if TYPE_CHECKING:
    from foreseed.engine.files import Fence

_Numbers = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]])
_HEAD = "# Who takes part, and each one's number in the run: foreseed serve EXPERIMENT.toml --enrolled THIS-FILE\n"


class EnrolmentError(ForeseedError):
    """An enrolment that cannot be; nothing was changed."""


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text!r} is no name: expected {NAMES}")
    return text


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    devices: dict[Annotated[str, AfterValidator(_name)], Annotated[int, Field(ge=0, lt=0xFFFFFFFF)]]


def read(path: Path) -> dict[str, int]:
    """The numbers of the names in an enrolment file."""
    try:
        numbers = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).devices
    except OSError as error:
        raise EnrolmentError(f"{path}: cannot read it ({error.strerror}); make it with foreseed fleet enrol") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EnrolmentError(
            f"{path}: not TOML ({error}); put it right, or make it with foreseed fleet enrol"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EnrolmentError(
            f"{path}: {where}: {first['msg']}; expected a table [devices] of names and numbers"
        ) from None
    _check(numbers, str(path))
    return numbers


def enrol(path: Path, names: Sequence[str], number: int | None = None) -> dict[str, int]:
    """Add names to an enrolment file, with the lowest numbers that are free, or this one; returns all that it holds.

    A name that is there already keeps its number.
    """
    if number is not None and len(names) != 1:
        raise EnrolmentError(f"--number {number} for {len(names)} devices; expected one device a number")
    numbers = read(path) if path.exists() else {}
    for name in names:
        if not is_name(name):
            raise EnrolmentError(f"device name {name!r}: expected {NAMES}")
        if number is not None and numbers.get(name, number) != number:
            raise EnrolmentError(f"{path}: {name} is device {numbers[name]} already; change its line there")
        taken = set(numbers.values())
        free = next(at for at in range(len(taken) + 1) if at not in taken)
        numbers.setdefault(name, free if number is None else number)
    _check(numbers, str(path))
    lines = [f"{literal(name)} = {at}\n" for name, at in sorted(numbers.items(), key=lambda item: item[1])]
    write_whole(path, "".join([_HEAD, "[devices]\n", *lines]).encode())
    return numbers


def agreed(enrolled: Mapping[str, int], known: Mapping[str, int], devices: int) -> dict[str, int]:
    """The enrolled numbers, if the run has room for them and knows none of their names by another."""
    for name, number in enrolled.items():
        if number >= devices:
            raise EnrolmentError(
                f"{name} is enrolled as device {number}, the run has 0 to {devices - 1}; raise data.devices, or enrol "
                "it with another number"
            )
        if known.get(name, number) != number:
            raise EnrolmentError(
                f"{name} is enrolled as device {number}, but was device {known[name]} in this run so far; a device "
                "keeps its number for a whole run"
            )
    return dict(enrolled)


def stored_numbers(folder: Path) -> dict[str, int]:
    """The numbers of the devices that have been ready in a run so far."""
    path = _numbers_file(folder)
    try:
        return _Numbers.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return {}
    except ValidationError:
        raise ForeseedError(
            f"{path} is damaged: it holds which device has which number; put it right, or start anew"
        ) from None


def store_numbers(folder: Path, numbers: Mapping[str, int], fence: Fence) -> None:
    """Write them to the disk of the run."""
    path = _numbers_file(folder)
    os.makedirs(path.parent, exist_ok=True)
    # A line each; `indent` would do it too, but take ten times as long, which a fleet of thousands feels.
    lines = json.dumps(numbers, separators=(",\n", ": "))[1:-1]
    write_whole(path, f"{{\n{lines}\n}}\n".encode(), fence=fence)


def _numbers_file(folder: Path) -> Path:
    return folder / "checkpoint" / "devices.json"


def _check(numbers: Mapping[str, int], where: str) -> None:
    names: dict[int, str] = {}
    for name, number in numbers.items():
        if number in names:
            raise EnrolmentError(
                f"{where}: {names[number]} and {name} are both device {number}; give one another number"
            )
        names[number] = name

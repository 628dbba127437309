"""What is wrong with a config, in one sentence: where it stands, the key, what was given, what is valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from foreseed.config.toml import literal
from foreseed.engine.errors import ForeseedError

_RULE = "rule"
_LONGEST_SHOWN = 60
_NOUNS: dict[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_BOUNDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


class ConfigError(ForeseedError):
    """A config that cannot be run as it is written."""


def rule(valid: str) -> PydanticCustomError:
    """What a validator raises for a value that breaks a rule of its own; `valid` says what would keep it."""
    return PydanticCustomError(_RULE, "{valid}", {"valid": valid})


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every table and key of a config, by dotted name."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if table := table_of(field):
            yield from fields(table, f"{prefix}{name}.")


def explain(model: type[BaseModel], problems: Sequence[ErrorDetails], origins: Mapping[str, str]) -> str:
    """Say what the first problem is and which other keys have one; `origins` tells where each key was set."""
    others = dict.fromkeys(".".join(map(str, problem["loc"])) for problem in problems[1:])
    also = f" (also to correct: {', '.join(others)})" if others else ""
    message = _sentence(model, problems[0], origins) + also
    # Keys and values are quoted as they came; a message must still fit on one line of any terminal.
    return message if message.isprintable() else message.encode("unicode_escape").decode()


def did_you_mean(given: Any, names: Sequence[str]) -> str:
    """The end of a sentence that suggests the nearest valid name, if one is near."""
    near = get_close_matches(given.lower(), names, n=1, cutoff=0.5) if isinstance(given, str) else ()
    return _suggestion(near)


def _sentence(model: type[BaseModel], problem: ErrorDetails, origins: Mapping[str, str]) -> str:
    if not problem["loc"]:
        return f"a config of type {type(problem['input']).__name__}, expected a table of keys and values"
    path = [str(name) for name in problem["loc"]]
    key, given = ".".join(path), problem["input"]
    where = f"{origins[key]}: " if key in origins else ""
    if problem["type"] == "extra_forbidden":
        parent = ".".join(path[:-1])
        names = ", ".join(name for table, name in _split_keys(model) if table == parent)
        return f"{where}unknown key {key}, expected one of {names}{_suggestion(_nearest_keys(model, key))}"
    field = dict(fields(model))[key]
    if problem["type"] == _RULE and table_of(field):  # of several keys together, so it is a sentence of its own
        return f"{where}{problem['msg']}"
    valid = problem["msg"] if problem["type"] == _RULE else _valid(field, given)
    return f"{where}{key} = {_shown(given)}, expected {valid}"


def _nearest_keys(model: type[BaseModel], key: str) -> list[str]:
    """The keys that are spelt most like this one: that of its own table, else those of any."""
    parent, _, given = key.rpartition(".")
    near = get_close_matches(given.lower(), [name for _, name in _split_keys(model)], n=1)
    found = {f"{table}.{name}".lstrip("."): table for table, name in _split_keys(model) if name in near}
    return [key for key, table in found.items() if table == parent] or list(found)


def _split_keys(model: type[BaseModel]) -> list[tuple[str, str]]:
    """The table and the name of every key."""
    return [(key.rpartition(".")[0], key.rpartition(".")[2]) for key, _ in fields(model)]


def accepts(field: FieldInfo) -> str:
    """What a key takes, read off its type and bounds."""
    kind = field.annotation
    if table_of(field):
        return "a table"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    bounds = [
        f"{words} {getattr(mark, bound.__name__.lower())}"
        for mark in field.metadata
        for bound, words in _BOUNDS.items()
        if isinstance(mark, bound)
    ]
    return _NOUNS[kind] + (f" {' and '.join(bounds)}" if bounds else "")


def _valid(field: FieldInfo, given: Any) -> str:
    """What a key takes, and which of its words was meant, if one is near."""
    words = ("true", "false") if field.annotation is bool else tuple(map(str, get_args(field.annotation)))
    return accepts(field) + did_you_mean(given, words)


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The table behind a field; None for a key."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _shown(value: Any) -> str:
    """What was given, short enough for a line."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print integers of thousands of digits
        text = hex(value)
    else:
        text = literal(value) if isinstance(value, str | bool | int | float) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def _suggestion(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""

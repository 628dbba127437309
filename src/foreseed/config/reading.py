"""Reading an experiment: a TOML file, those that it extends, and overrides from the command line."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreseed.config.errors import ConfigError, fields, table_of
from foreseed.config.method_registry import methods
from foreseed.config.schema import Config, merge, nested
from foreseed.config.shipped import find

_COMMAND_LINE = "command line"


def load(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read an experiment file (None: all defaults) and apply overrides such as "train.k=100" to it.

    A name such as "demo" is that of an experiment that comes with the package, unless there is a file of that name.
    A file may name another that it builds on, `extends = "base.toml"`, relative to itself; its own keys win. The
    value of an override is TOML; what is no TOML value is taken as text, so that quotes are seldom needed.
    """
    methods()  # whose own tables a file may hold
    by_default = "by default" if path is None else f"{os.fspath(path)}, by default"
    origins = {key: by_default for key, _ in fields(Config)}
    tables: dict[str, Any] = {}
    for origin, given in [*_files(path), *((_COMMAND_LINE, _override(text)) for text in overrides)]:
        merge(tables, given)
        origins.update(dict.fromkeys(_keys(given), origin))
    return Config.model_validate(tables, context=origins)


def overridden(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that overrides give a value."""
    known = {key for key, field in fields(Config) if table_of(field) is None}
    return [key for text in overrides for key in _keys(_override(text)) if key in known]


def _files(path: str | os.PathLike[str] | None) -> list[tuple[str, dict[str, Any]]]:
    """The content of a file and of all that it extends, the most basic first."""
    chain: list[tuple[str, dict[str, Any]]] = []
    seen: set[Path] = set()
    here = None if path is None else find(path)
    while here is not None:
        wanted_by = f"{chain[0][0]}: extends " if chain else ""
        if here.resolve() in seen:
            raise ConfigError(f"{wanted_by}{here}, which extends it in turn; expected a chain of files with an end")
        seen.add(here.resolve())
        tables = _read(here, wanted_by)
        base = tables.pop("extends", None)
        if base is not None and not isinstance(base, str):
            raise ConfigError(f'{here}: extends = {base}, expected one path in quotes, such as "base.toml"')
        chain.insert(0, (os.fspath(here), tables))
        here = here.parent / base if base is not None else None
    return chain


def _read(path: Path, wanted_by: str) -> dict[str, Any]:
    try:
        # Some editors put a byte order mark in front, which TOML does not know.
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{wanted_by}{path}: cannot be read ({error.strerror}), expected an experiment file; check its path"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{wanted_by}{path}: not TOML: {error}; correct the file there") from None


def _override(text: str) -> dict[str, Any]:
    """An override as the tables that a file would hold."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals):
        raise ConfigError(f"{_COMMAND_LINE}: {text!r}, expected key=value, such as train.k=100")
    return nested(key, _value(key, value))


def _value(key: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    # A key of text takes what was typed, even where it reads like a number; a line break would smuggle in more keys.
    is_text = key in {name for name, field in fields(Config) if field.annotation is str}
    return text if len(parsed) > 1 or (is_text and not isinstance(value, str)) else value


def _keys(tables: Mapping[str, Any]) -> Iterator[str]:
    """The dotted names of all tables and keys that were given."""
    for name, value in tables.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value)

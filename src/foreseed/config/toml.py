"""TOML text of settings; the standard library reads TOML but does not write it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import BaseModel

_COMMENT_COLUMN = 26


def literal(value: str | bool | int | float) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # JSON escapes printable text as TOML does
    return repr(value)


def document(config: BaseModel) -> str:
    """A TOML file with every key, its comment behind it; tables come last, as TOML demands."""
    tables = [(name, value) for name, value in config if isinstance(value, BaseModel)]
    lines = list(_assignments(config))
    for name, table in tables:
        lines += ["", f"[{name}]  # {type(config).model_fields[name].description}", *_assignments(table)]
    return "\n".join(lines) + "\n"


def _assignments(table: BaseModel) -> Iterator[str]:
    for name, value in table:
        if not isinstance(value, BaseModel):
            assignment = f"{name} = {literal(value)}"
            yield f"{assignment:<{_COMMENT_COLUMN}}  # {type(table).model_fields[name].description}"

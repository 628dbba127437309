"""`python -m foreseed.config.reference`: every table and key of an experiment as a page, written from the schema."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pydantic import BaseModel

from foreseed.config.errors import accepts, table_of
from foreseed.config.method_registry import methods
from foreseed.config.schema import Config
from foreseed.config.toml import literal

_HEAD = (
    "# The experiment file",
    "",
    "An experiment is one TOML file: the keys without a table first, then `[data]`, `[model]` and so on. Every key has "
    "a default, so a file holds what differs. `foreseed run exp.toml train.k=100` overrides a key. A file may build on "
    'another, `extends = "base.toml"`, relative to itself; its own keys win. A key that is not here, or a value that a '
    "key does not take, is refused with what was meant. The run's folder keeps the whole config as `config.toml`.",
    "",
    "This page is made of the schema: `python -m foreseed.config.reference > docs/config.md`.",
    "",
)
_POWERS = {str(2**32 - 1): "2^32 - 1", str(2**63 - 1): "2^63 - 1", str(2**16): "2^16", str(10**9): "10^9"}
"""Bounds that are easier to read like this."""


def reference() -> str:
    """The page, in Markdown."""
    known = methods()  # asked first: methods bring tables of their own
    lines = [*_HEAD, "## Without a table", "", *_rows(Config)]
    for name, field in Config.model_fields.items():
        if (table := table_of(field)) is not None:
            lines += ["", f"## `[{name}]`", "", f"{(field.description or '').capitalize()}.", "", *_rows(table)]
    lines += ["", "## Methods", "", "| `method` | |", "|---|---|"]
    lines += [f"| `{method.name}` | {method.summary} |" for method in known.values()]
    return "\n".join(lines) + "\n"


def _rows(table: type[BaseModel]) -> Iterator[str]:
    yield from ("| key | takes | default | |", "|---|---|---|---|")
    for name, field in table.model_fields.items():
        if table_of(field) is None:
            takes = " ".join(_POWERS.get(word, word) for word in accepts(field).split())
            yield f"| `{name}` | {takes} | `{literal(field.default)}` | {field.description} |"


if __name__ == "__main__":
    sys.stdout.write(reference())

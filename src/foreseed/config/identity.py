"""Whether two configs are the same experiment."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel

from foreseed.config.errors import fields
from foreseed.config.schema import Config

_NO_EFFECT = {"workers", "name"}
"""Keys that change no bit of a run."""
_TABLES_OF_NO_EFFECT = {"fleet", "track"}
"""Nor do the keys of these, which a run may change when it is resumed."""
_EXCEPT = {"fleet.max_share"}


def fingerprint(config: Config) -> str:
    """SHA-256 of all that shapes a run: two configs with the same fingerprint give the same run to the bit."""
    return hashlib.sha256(json.dumps(_content(config), sort_keys=True).encode()).hexdigest()


def differences(a: Config, b: Config) -> list[str]:
    """The keys that make two configs different runs; none exactly if their fingerprints are equal."""
    ours, theirs = _content(a), _content(b)
    return [key for key in ours if ours[key] != theirs[key]]


def _content(config: Config) -> dict[str, str]:
    """Values by dotted key, as text: 0.0 and -0.0 are equal as numbers, but not to the bit."""
    content = {}
    for key, _ in fields(Config):
        table, _, name = key.rpartition(".")
        value = getattr(getattr(config, table) if table else config, name)
        shapes = key in _EXCEPT or (key not in _NO_EFFECT and table not in _TABLES_OF_NO_EFFECT)
        if shapes and not isinstance(value, BaseModel):
            content[key] = json.dumps(value)
    return content

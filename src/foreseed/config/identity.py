"""Whether two configs are the same experiment, and what of one may change while it runs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from foreseed.config.errors import fields
from foreseed.config.schema import Config

_NO_EFFECT = {"workers", "name"}
"""Keys that change no bit of a run."""
_TABLES_OF_NO_EFFECT = {"fleet", "track"}
"""Nor do the keys of these, which a run may change when it is resumed."""
_EXCEPT = {"fleet.max_share"}
"""But for this one, which weighs what devices say."""

CHANGEABLE = (
    "rounds", "eval_every", "train.k", "train.sigma", "train.spread", "train.blocks", "train.difference",
    "train.local_lr", "train.bits", "train.lr", "train.weight_decay", "train.lr_decay", "train.schedule",
    "train.warmup", "train.nesterov", "train.restarts", "train.clip", "train.rate", "train.robust",
    "train.trim", "train.epochs", "fleet.max_share",
)  # fmt: skip
"""Keys that shape a run, but nothing of what it has come to so far: rounds from now on may follow another value."""
_WHY_FIXED = {
    "seed": "every draw so far came of it",
    "method": "what the run has come to is of that method",
    "engine": "the rounds so far were computed by it",
    "preset": "it set other keys when the run began; set those that may change",
    "data": "it decides which images are learnt, and which device holds them",
    "model": "the values are of that model",
    "prune": "the values are of that mask",
    "train": "what the server keeps from round to round is laid out by it",
}


def fingerprint(config: Config) -> str:
    """SHA-256 of all that shapes a run: two configs with the same fingerprint give the same run to the bit."""
    return hashlib.sha256(json.dumps(content(config), sort_keys=True).encode()).hexdigest()


def differences(a: Config, b: Config) -> list[str]:
    """The keys that make two configs different runs; none exactly if their fingerprints are equal."""
    ours, theirs = content(a), content(b)
    return [key for key in ours if ours[key] != theirs[key]]


def why_fixed(key: str) -> str:
    """Why a key cannot change once a run has begun; empty if it can."""
    return "" if key in CHANGEABLE else _WHY_FIXED.get(key.partition(".")[0], "the rounds so far followed it")


def content(config: Config) -> dict[str, str]:
    """The values that shape a run by dotted key, as text: 0.0 and -0.0 are equal as numbers, but not to the bit."""
    return {
        key: json.dumps(value_of(config, key))
        for key, _ in fields(Config)
        if (key in _EXCEPT or (key not in _NO_EFFECT and key.rpartition(".")[0] not in _TABLES_OF_NO_EFFECT))
        and not isinstance(value_of(config, key), BaseModel)
    }


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    table, _, name = key.rpartition(".")
    return getattr(getattr(config, table) if table else config, name)

"""Any config that is valid."""

from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st

from foreseed.config import Config, methods
from foreseed.config.errors import fields, table_of

_PRINTABLE = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), max_size=20)
_TEXTS = {
    "method": st.sampled_from(list(methods())),
    "name": st.from_regex(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})?", fullmatch=True),
    "data.set": st.sampled_from(["digits", "cifar10"]) | _PRINTABLE.map(lambda text: f"./{text}"),
    "data.root": _PRINTABLE,
    "track.to": st.lists(st.sampled_from(["tensorboard", "mlflow", "wandb", "a.b:make"])).map(", ".join),
    "track.folder": _PRINTABLE,
    "track.project": _PRINTABLE.map(lambda text: f"p{text}"),
    "model.weights": st.just("") | _PRINTABLE.map(lambda text: f"{text}.pt"),
    "model.name": st.sampled_from(["lenet5", "resnet20"]) | _PRINTABLE.map(lambda text: f"{text}:make"),
}


def _values(key, field):
    kind = field.annotation
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        return _TEXTS[key]
    bounds = {type(mark): getattr(mark, type(mark).__name__.lower()) for mark in field.metadata}
    if kind is int:
        return st.integers(bounds[Ge], bounds[Le])
    return st.floats(
        bounds.get(Ge, bounds.get(Gt)),
        bounds.get(Le, bounds.get(Lt)),
        exclude_min=Gt in bounds,
        exclude_max=Lt in bounds,
    )


def _fitting(settings):
    """Settings with the keys that others bound cut down to fit."""
    base = Config()
    for key, limit, default in (
        ("data.per_round", "data.devices", base.data.devices),
        ("train.spread", "train.k", base.train.k),
    ):
        settings[key] = min(settings.get(key, 1), settings.get(limit, default))
    if settings.get("prune.pruner") in ("grasp", "erk", "random"):
        settings["prune.cost"] = "none"
    if settings.get("train.robust") == "trim":
        settings["train.seeds"] = "shared"
    if settings.get("train.seeds") == "shared":
        settings["train.memory"] = False
    if not settings.get("train.memory") or not settings.get("train.momentum", 1) or "train.optimiser" in settings:
        settings["train.nesterov"] = False
    if not settings.get("train.momentum", 1) or "train.optimiser" in settings:
        settings["train.restarts"] = False
    if settings.get("train.rate") == "layers" and not settings.get("train.memory"):
        settings["train.rate"] = "noise"
    if settings.get("train.bits", 32) < 32 or settings.get("train.blocks", 1) > 1:
        settings["train.local_steps"] = 1
    return settings


SETTINGS = {key: _values(key, field) for key, field in fields(Config) if not table_of(field)}
configs = st.fixed_dictionaries({}, optional=SETTINGS).map(_fitting).map(Config().with_)

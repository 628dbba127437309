"""A run that went wrong goes on otherwise: from an earlier round, or with other settings.

Several files change, and a kill may come between any two of them. So all that is to be done is written down first, in
one file, and done from there; whoever finds that file does it again, which comes to the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreseed.config import CHANGEABLE, Config, ConfigError, content, differences, overridden, value_of, why_fixed
from foreseed.config import load as load_config
from foreseed.engine.files import write_whole
from foreseed.runs import checkpoint
from foreseed.runs.folder import METRICS, RunError, RunFolder, damaged, read_text
from foreseed.runs.records import Change, Record, to_json

_CHANGES = "changes.jsonl"
_NO_LONGER_TRUE = ("summary.json", "model.fsp", "model-ema.fsp")


class _Plan(Record):
    """All that is to be done; paths are of the run's folder."""

    config: str
    changes: tuple[Change, ...]
    """All of the run's, with the new one at the end."""
    back_to: int | None


@dataclass(frozen=True)
class Resumption:
    """How a run goes on: with this config, once `carry_out` has made it so."""

    config: Config
    _place: RunFolder
    _plan: _Plan | None

    def carry_out(self) -> str:
        """Change what is to be changed, and say it; nothing, if the run goes on as it was."""
        if self._plan is None:
            return ""
        write_whole(_plan_file(self._place), to_json(self._plan))
        _carry_out(self._place)
        return described(self._plan.changes[-1])


def changes_of(folder: Path) -> tuple[Change, ...]:
    """What was changed in a run since it began, in order."""
    path = folder / _CHANGES
    try:
        return tuple(Change.model_validate_json(line) for line in read_text(path).splitlines()) if path.exists() else ()
    except ValueError as error:
        raise damaged(path, str(error)) from None


def times_gone_back(folder: Path) -> int:
    """How often a run went back to an earlier round."""
    return sum(change.went_back_from is not None for change in changes_of(folder))


def described(change: Change) -> str:
    """A change in a sentence."""
    said = [f"{key} from {before} to {after}" for key, (before, after) in change.settings.items()]
    if change.went_back_from is not None:
        said.insert(0, f"back to round {change.round}; rows of later rounds are in {change.abandoned}")
    return "; ".join(said)


def asked(folder: Path, file: Path | None, overrides: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """What a command line asks of a run that it resumes: its experiment, and the keys that it gives another value.

    Overrides are what may change a run; a file has to be the run's own. Without one the run's own is taken.
    """
    own = folder / "config.toml"
    if not own.exists():
        raise RunError(f"{folder}: no run to resume there; start it without --resume")
    current = load_config(own)
    given = load_config(file, overrides) if file is not None else _without_file(folder, current, own, overrides)
    changed = set(differences(current, given))
    return given, {key: value_of(given, key) for key in overridden(overrides) if key in changed}


def _without_file(folder: Path, current: Config, own: Path, overrides: Sequence[str]) -> Config:
    try:
        # The very words that the run was started with: some say more together than one by one (train.spread = "auto").
        given = load_config(None, overrides)
        if not _foreign(current, given, _first_settings(folder), ()):
            return given
    except ConfigError:
        pass
    return load_config(own, overrides)


def plan(place: RunFolder, given: Config, changes: Mapping[str, Any], at: int | None) -> Resumption:
    """How a run is to go on that is resumed with a config, changes to it, and from an earlier round if one is given."""
    if _plan_file(place).exists():
        _carry_out(place)
    current, before = load_config(place.config), changes_of(place.path)
    if foreign := _foreign(current, given, _first_settings(place.path), changes):
        may = " and ".join(f"{key}=VALUE" for key in foreign) if all(key in CHANGEABLE for key in foreign) else ""
        raise RunError(
            f"{place.path}: that run has another config ({'; '.join(foreign)}); resume it with its own"
            + (f", or change it by {may} after --resume" if may else "")
        )
    as_it_was = {key: value_of(current, key) for key in differences(current, given)}
    config = given.with_(as_it_was | dict(changes))
    settings = {key: (value_of(current, key), value_of(config, key)) for key in differences(current, config)}
    _refuse_fixed(place, settings)
    round = _round_to_go_on_from(place, at)
    if "rounds" in settings and config.rounds <= round:
        raise RunError(f"{place.path}: rounds = {config.rounds}, the run is at round {round}; expected more than that")
    back = at is not None and len(place.lines()) > round
    if not settings and not back:
        return Resumption(config, place, None)
    change = Change(round=round, settings=settings)
    if back:
        number = 1 + sum(earlier.abandoned is not None for earlier in before)
        change = change.model_copy(
            update={"went_back_from": len(place.lines()), "abandoned": f"abandoned-{number}.jsonl"}
        )
    plan = _Plan(config=config.to_toml(), changes=(*before, change), back_to=round if back else None)
    return Resumption(config, place, plan)


def _plan_file(place: RunFolder) -> Path:
    return place.checkpoint.with_name("mending.json")


def _foreign(current: Config, given: Config, first: Mapping[str, str], changes: Collection[str]) -> list[str]:
    """Keys of a config that are neither the run's, nor what it began with, nor a change."""
    theirs = content(given)
    return [key for key in differences(current, given) if key not in changes and theirs[key] != first.get(key)]


def _first_settings(folder: Path) -> dict[str, str]:
    """What the keys that were changed were when the run began, as `content` has them."""
    first: dict[str, str] = {}
    for change in changes_of(folder):
        for key, (before, _) in change.settings.items():
            first.setdefault(key, json.dumps(before))
    return first


def _refuse_fixed(place: RunFolder, settings: Mapping[str, Any]) -> None:
    fixed = {key: why for key in settings if (why := why_fixed(key))}
    if fixed:
        reasons = "; ".join(f"{key} cannot change in a run ({why})" for key, why in fixed.items())
        raise RunError(f"{place.path}: {reasons}; start another run for that, or change one of {', '.join(CHANGEABLE)}")


def _round_to_go_on_from(place: RunFolder, at: int | None) -> int:
    if at is None:
        return checkpoint.round_of(place.checkpoint)
    rounds = place.kept.rounds()
    if at not in rounds:
        there = f"there are {', '.join(map(str, rounds))}" if rounds else "there is none yet"
        raise RunError(f"{place.path}: no checkpoint of round {at} is kept; {there}")
    return at


def _carry_out(place: RunFolder) -> None:
    """Do what the plan says, or what a kill has left of it."""
    path = _plan_file(place)
    plan = _Plan.model_validate_json(path.read_bytes())
    change = plan.changes[-1]
    if plan.back_to is not None:
        lines = place.lines()
        if len(lines) > plan.back_to:
            assert change.abandoned is not None
            write_whole(place.path / change.abandoned, *lines[plan.back_to :])
            write_whole(place.path / METRICS, *lines[: plan.back_to])
        place.kept.put_back(plan.back_to)
    write_whole(place.path / _CHANGES, *(to_json(change) + b"\n" for change in plan.changes))
    write_whole(place.config, plan.config.encode())
    for name in _NO_LONGER_TRUE:
        (place.path / name).unlink(missing_ok=True)
    path.unlink()

"""What a newcomer has just seen, in a few plain sentences that the numbers carry, and what to try next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from shlex import quote

from foreseed.config import ConfigError, load
from foreseed.report.arms import Arm, Stat, group
from foreseed.report.read import read_runs
from foreseed.report.table import shown
from foreseed.report.words import percent

_HOW = {
    "difference": "with forward passes alone",
    "exact": "with exact derivatives, which forward passes on a device come close to",
    "backprop": "by backpropagation",
}
_CONTROLS = {"random", "magnitude", "erk"}
"""Pruners that show what a better choice of weights is worth."""
_STEPS = 3


@dataclass(frozen=True)
class Suggestion:
    """A command that works as it is printed, and what it is good for."""

    command: str
    why: str


@dataclass(frozen=True)
class Closing:
    """The last words on some runs."""

    sentences: list[str]
    steps: list[Suggestion]


def closing(runs: Sequence[str | os.PathLike[str]], folder: Path) -> Closing:
    """The last words on finished runs, whose report is in `folder`."""
    arms = group(read_runs(runs))
    lead = min(arms, key=_rank)
    return Closing(list(_sentences(lead, arms)), list(_steps(lead, arms, folder))[:_STEPS])


def _rank(arm: Arm) -> tuple[bool, bool, bool]:
    """The arm to speak of comes first: without backpropagation, pruned, and not as a control."""
    return _backpropagates(arm), not arm.pruned, _pruner(arm) in _CONTROLS


def _backpropagates(arm: Arm) -> bool:
    return arm.first.engine == "backprop"


def _pruner(arm: Arm) -> str:
    return arm.first.pruning.pruner if arm.first.pruning else ""


def _sentences(lead: Arm, arms: Sequence[Arm]) -> Iterator[str]:
    task = (lead.first.data, lead.first.model, lead.first.n_total)
    rivals = [arm for arm in arms if arm is not lead and (arm.first.data, arm.first.model, arm.first.n_total) == task]

    def rival(is_one: Callable[[Arm], bool]) -> Arm | None:
        return next((arm for arm in rivals if is_one(arm)), None)

    # Of two that backpropagate, the dense one: it is what everybody knows.
    rivals.sort(key=lambda arm: arm.pruned)
    learner = None if _backpropagates(lead) else rival(_backpropagates)
    dense = rival(lambda arm: lead.pruned and not arm.pruned and _backpropagates(arm) == _backpropagates(lead))
    control = rival(lambda arm: _pruner(arm) in _CONTROLS - {_pruner(lead)} and _same_size(arm, lead))

    yield _reached(lead, learner)
    if learner:
        yield f"{learner.label} came to {_came_to(learner, lead)}; {_took(learner, lead)}."
    if dense:
        costs = (
            f"{_ratio(lead, dense, 'flops')} its FLOPs and {_ratio(lead, dense, 'bytes_up', 'bytes_down')} its bytes"
        )
        yield f"{dense.label}, which keeps every weight, came to {_came_to(dense, lead)}; {lead.label} took {costs}."
    elif lead.pruned:
        share = lead.numbers["total.flops"].mean / lead.numbers["total.dense_flops"].mean
        kept = percent(Stat(lead.numbers["density"].mean, None))
        yield f"{lead.label} kept {kept} of the weights, and took {share:.2g} of the FLOPs that all of them would have."
    if control:
        mask = f"{'An' if _pruner(control)[0] in 'aeiou' else 'A'} {_pruner(control)} mask of the same size"
        yield f"{mask} came to {_came_to(control, lead)}; {_took(control, lead)}."
    if rivals and not (learner or dense or control):
        best, *_, worst = sorted((lead, *rivals), key=lambda arm: -_accuracy(arm).mean)
        yield (
            f"Of {len(rivals) + 1} arms, {best.label} came highest with {percent(_accuracy(best))}, and {worst.label} "
            f"lowest with {_came_to(worst, best)}."
        )
    up, down = (shown(f"per_device_round.bytes_{way}", _means(lead)) for way in ("up", "down"))
    theirs = f"; one of {learner.label} sends {shown('per_device_round.bytes_up', _means(learner))}" if learner else ""
    yield f"A device of {lead.label} sends {up} a round and receives {down}{theirs}."
    if not rivals and (cost := lead.first.pruning) and not (cost.device_flops or cost.device_bytes_up):
        yield f"Choosing those weights took {shown('pruning.seconds', _means(lead))}, and the devices nothing."
    if rivals and all(len(arm.seeds) == 1 for arm in arms):
        yield "All this is one seed: with another, small differences may turn."


def _reached(lead: Arm, learner: Arm | None) -> str:
    tests = min(sum(row.accuracy is not None for row in run.rounds) for run in lead.runs)
    mean = f"mean of the last {min(tests, 5)} tests" if tests > 1 else "in its only test"
    how = _HOW.get(lead.first.engine, f"with engine {lead.first.engine}")
    if not _backpropagates(lead) and lead.first.pruning and not lead.first.pruning.bp_free:
        how += ", once its devices had backpropagated to prune"
    needs = f"a device needs {_memory(lead)} of memory for {_batch(lead)}"
    theirs = f", {learner.label}’s backpropagation {_memory(learner)} for {_batch(learner)}" if learner else ""
    return f"{lead.label} reached {percent(_accuracy(lead))} ({mean}) {how}: {needs}{theirs}."


def _accuracy(arm: Arm) -> Stat:
    return arm.numbers["last_mean_accuracy"]


def _means(arm: Arm) -> dict[str, Stat]:
    return {path: Stat(stat.mean, None) for path, stat in arm.numbers.items()}


def _memory(arm: Arm) -> str:
    return shown("memory.planned_bytes", _means(arm))


def _batch(arm: Arm) -> str:
    images = round(arm.numbers["memory.batch"].mean)
    return f"{images} images at a time" if images > 1 else "an image at a time"


def _same_size(arm: Arm, other: Arm) -> bool:
    return arm.pruned and arm.first.method == other.first.method and arm.first.density == other.first.density


def _came_to(arm: Arm, other: Arm) -> str:
    """An arm's accuracy, and whether it is ahead of another's, behind it, or not to be told from it."""
    its, others = _accuracy(arm), _accuracy(other)
    points, spread = 100 * (its.mean - others.mean), 100 * hypot(its.std or 0, others.std or 0)
    if spread and abs(points) <= spread:
        return f"{percent(its)}, within the seeds’ spread of {other.label}"
    if abs(points) < 0.05:
        return f"{percent(its)}, the same as {other.label}"
    return f"{percent(its)}, {abs(points):.1f} points {'more' if points > 0 else 'less'} than {other.label}"


def _took(arm: Arm, other: Arm) -> str:
    return f"it took {_ratio(arm, other, 'flops')} the FLOPs"


def _ratio(arm: Arm, other: Arm, *keys: str) -> str:
    its, others = (sum(a.numbers[f"total.{key}"].mean for key in keys) for a in (arm, other))
    share = its / others
    return f"{share:.2g} of" if share < 0.995 else f"{share:.1f} times"


def _steps(lead: Arm, arms: Sequence[Arm], folder: Path) -> Iterator[Suggestion]:
    """Commands that go on from these runs, the most telling first."""
    files = [arm.runs[0].folder / "config.toml" for arm in arms]
    first = files[arms.index(lead)]
    try:
        names, config = {load(file).run_name for file in files}, load(first)
    except ConfigError:
        files = []  # of a method that is not installed here, say: nothing to go on from

    def out(suffix: str) -> str:
        return f"--out {quote(str(_fresh(folder, suffix)))}"

    # On a command line a path with = would be taken for an override.
    if files and not any("=" in str(file) for file in files):
        its = quote(str(first))
        if len(arms) == 1:
            other, how = ("ntk-baffle", "difference") if _backpropagates(lead) else ("fedavg", "backprop")
            methods = f"--methods {lead.first.method},{other}"
            yield Suggestion(
                f"foreseed compare {its} {methods} {out('rivals')}", f"the same beside {other}: {_HOW[how]}"
            )
        if len(names) == len(files) and all(len(arm.seeds) == 1 for arm in arms):
            quoted = " ".join(quote(str(file)) for file in files)
            yield Suggestion(
                f"foreseed compare {quoted} --seeds 0,1,2 {out('seeds')}", "whether it holds with other seeds"
            )
        k, spread = 10 * config.train.k, 10 * config.train.spread
        # Each part of a device's images needs one.
        if not _backpropagates(lead) and spread <= min(lead.first.partition.sizes):
            more = f"train.k={k} train.spread={spread} {out(f'k{k}')}"
            yield Suggestion(f"foreseed run {its} {more}", "ten times the directions, for the same forward passes")
    yield Suggestion(
        f"foreseed testbed {out('testbed')}", "ten device processes of 64 MB each, and a broker between them"
    )
    yield Suggestion("foreseed bench memory", "what a device needs, beside a process that backpropagates")
    yield Suggestion("foreseed doctor", "what this machine has")


def _fresh(folder: Path, suffix: str) -> Path:
    """A folder beside another that is not there yet."""
    folder = folder if folder.name else folder.resolve()
    names = (f"{folder.name}-{suffix}{number}" for number in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(path for name in names if not (path := folder.with_name(name)).exists())

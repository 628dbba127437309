"""A run that went wrong is mended: it goes back, or goes on with other settings, whatever kills it meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.config import CHANGEABLE, Config, ConfigError, content, load
from foreseed.engine import ForeseedError
from foreseed.runs import Kept, Progress, RunError, asked, changes_of, read_run
from foreseed.simulate import run_simulated as run
from tests.runs.kills import go_on
from tests.runs.test_runs import ARMS, Kill, files
from tests.simulate.small import World, make_world, outcome, rows_of, small_config


def long_config(bars: Path, **changes: Any) -> Config:
    """With a checkpoint of round 10 to go back to."""
    return small_config(bars, **{"rounds": 13} | changes)


def same_as(folder: Path, other: Path) -> bool:
    """Whether two runs came to the same, but for what is written of changes."""
    left, right = outcome(folder), outcome(other)
    left["summary"].pop("changes", None)
    return left == right


@pytest.mark.parametrize("arm", ["ntk-baffle", "memory", "adam", "batch-norm", "fedsgd", "fedavg"])
def test_a_run_gone_back_and_continued_ends_in_the_same_bits(arm: str, bars: Path, tmp_path: Path) -> None:
    config = long_config(bars, **ARMS[arm])
    world = make_world(config)
    run(config, tmp_path / "whole", prepared=world)
    shutil.copytree(tmp_path / "whole", tmp_path / "back")
    abandoned = rows_of(tmp_path / "back")[10:]
    run(config, tmp_path / "back", resume=True, at=10, prepared=world)
    assert same_as(tmp_path / "back", tmp_path / "whole")
    kept_aside = [json.loads(line) for line in (tmp_path / "back" / "abandoned-1.jsonl").read_text().splitlines()]
    assert [row | {"seconds": 0} for row in kept_aside] == [row | {"seconds": 0} for row in abandoned]
    (change,) = changes_of(tmp_path / "back")
    assert (change.round, change.went_back_from, change.settings) == (10, 13, {})
    assert read_run(tmp_path / "back").summary.changes == (change,)


def test_a_setting_changes_from_a_round_on_and_the_record_says_so(bars: Path, tmp_path: Path) -> None:
    config = long_config(bars)
    world = make_world(config)
    run(config, tmp_path / "run", prepared=world)
    before = rows_of(tmp_path / "run")
    notes: list[str] = []

    def watch(progress: Progress) -> None:
        notes.append(progress.note)

    changes = {"train.lr": 0.001, "train.robust": "clip", "rounds": 15}
    summary = run(config, tmp_path / "run", resume=True, at=10, changes=changes, prepared=world, watch=watch)
    after = rows_of(tmp_path / "run")
    assert after[:10] == before[:10]
    assert [row["lr"] for row in after[10:]] == [0.001 * 0.998**round for round in range(10, 15)]
    assert summary.rounds == len(after) == 15
    (change,) = changes_of(tmp_path / "run")
    assert change.settings == {"rounds": (13, 15), "train.lr": (0.01, 0.001), "train.robust": ("none", "clip")}
    assert "back to round 10" in notes[0]
    assert "train.lr from 0.01 to 0.001" in notes[0]
    assert load(tmp_path / "run" / "config.toml").train.lr == 0.001


def test_a_change_lasts_whoever_resumes_and_can_be_taken_back(bars: Path, tmp_path: Path) -> None:
    config = long_config(bars)
    world = make_world(config)
    run(config, tmp_path / "run", prepared=world)
    run(config, tmp_path / "run", resume=True, at=12, changes={"train.lr": 0.002}, prepared=world)
    changed = outcome(tmp_path / "run")
    run(config, tmp_path / "run", resume=True, at=12, prepared=world)  # with the file that it began with
    again = outcome(tmp_path / "run")
    assert (again["model"], again["rows"]) == (changed["model"], changed["rows"])
    run(config, tmp_path / "run", resume=True, at=12, changes={"train.lr": 0.01}, prepared=world)
    run(config, tmp_path / "whole", prepared=world)
    assert same_as(tmp_path / "run", tmp_path / "whole")
    assert [change.abandoned for change in changes_of(tmp_path / "run")] == [f"abandoned-{i}.jsonl" for i in (1, 2, 3)]


@pytest.mark.parametrize("key", sorted(set(content(load())) - set(CHANGEABLE)))
def test_what_may_not_change_is_refused_by_name_and_nothing_changes(key: str, finished: Path, world: World) -> None:
    value = json.loads(content(world.config)[key])
    other = {bool: lambda: not value, int: lambda: value + 1, float: lambda: 0.4321, str: lambda: _OTHER[key]}
    before = files(finished)
    with pytest.raises((RunError, ConfigError), match=key.rpartition(".")[2]) as refusal:
        run(world.config, finished, resume=True, at=3, changes={key: other[type(value)]()}, prepared=world)
    if isinstance(refusal.value, RunError):
        assert f"{key} cannot change in a run (" in str(refusal.value)
    assert files(finished) == before


_OTHER = {
    "method": "fedavg", "engine": "exact", "preset": "best", "data.set": "digits", "data.root": "x",
    "data.partition": "iid", "model.name": "lenet5", "model.activation": "relu", "model.norm": "batch",
    "model.init": "torch", "model.weights": "w.npz",
    "prune.pruner": "random", "prune.cost": "flops", "baffle-original.level": "epoch", "feddst.distribution": "erk",
    "prunefl.times": "measured", "zerofl.dense": "both", "zerofl.uplink": "top-k-of-diff",
    "train.direction": "rademacher", "train.seeds": "shared", "train.optimiser": "adam",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(bars: Path) -> World:
    return make_world(small_config(bars))


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(world.config, folder, prepared=world)
    return folder


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"at": 1}, "no checkpoint of round 1 is kept; there are 3, 4, 5"),
        ({"at": 9}, "no checkpoint of round 9 is kept"),
        ({"changes": {"rounds": 5, "train.lr": 0.2}, "at": 4}, ""),
        ({"changes": {"rounds": 4}, "at": 4}, "rounds = 4, the run is at round 4; expected more than that"),
        ({"changes": {"rounds": 3}}, "rounds = 3, the run is at round 5"),
        ({"changes": {"train.robust": "trim"}}, "train.robust"),
        ({"changes": {"train.lrr": 1}}, "train.lr"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changes(
    options: dict[str, Any], complaint: str, finished: Path, world: World, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    before = files(tmp_path / "run")
    if not complaint:
        run(world.config, tmp_path / "run", resume=True, prepared=world, **options)
        return
    with pytest.raises(ForeseedError, match=complaint.replace("(", r"\(")):
        run(world.config, tmp_path / "run", resume=True, prepared=world, **options)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("arm", "call"),
    [(arm, call) for arm in ("ntk-baffle", "memory") for call in ("fsync", "replace", "unlink")]
    + [("ntk-baffle", "rename")],  # of checkpoints that are let go
)
def test_going_back_stopped_at_any_write_comes_to_the_same(
    arm: str, call: str, bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = long_config(bars, rounds=11, **ARMS[arm])
    world = make_world(config)
    run(config, tmp_path / "whole", prepared=world)
    shutil.copytree(tmp_path / "whole", tmp_path / "back")
    run(config, tmp_path / "back", resume=True, at=10, changes={"train.lr": 0.003}, prepared=world)
    expected, real, stops = outcome(tmp_path / "back"), getattr(os, call), 0
    mended = 0
    while True:
        left = stops

        def stopping(*arguments: Any, **options: Any) -> None:
            nonlocal left
            if not left:
                raise Kill
            left -= 1
            real(*arguments, **options)

        folder = tmp_path / str(stops)
        shutil.copytree(tmp_path / "whole", folder)
        monkeypatch.setattr(os, call, stopping)
        try:
            run(config, folder, resume=True, at=10, changes={"train.lr": 0.003}, prepared=world)
            break
        except Kill:
            monkeypatch.setattr(os, call, real)
        go_on(config, folder)
        # Either it was written down what is to be done, and it was done, or nothing has happened yet.
        if (folder / "changes.jsonl").exists():
            assert outcome(folder) == expected
            mended += 1
        else:
            assert outcome(folder) == outcome(tmp_path / "whole")
        stops += 1
    assert mended >= 1


def test_a_checkpoint_that_is_damaged_is_no_end(bars: Path, tmp_path: Path) -> None:
    config = long_config(bars)
    world = make_world(config)
    run(config, tmp_path / "whole", prepared=world)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "state.npz").write_bytes(b"no checkpoint")
    with pytest.raises(ForeseedError, match="go back with --resume --at ROUND"):
        run(config, tmp_path / "run", resume=True, prepared=world)
    run(config, tmp_path / "run", resume=True, at=11, prepared=world)
    assert same_as(tmp_path / "run", tmp_path / "whole")


def test_kept_checkpoints_with_a_memory_are_whole(bars: Path, tmp_path: Path) -> None:
    """Each has its own file of estimates: that of its round, whatever was written since."""
    config = long_config(bars, rounds=21, **ARMS["memory"])
    world = make_world(config)
    seen: dict[int, bytes] = {}

    def watch(progress: Progress) -> None:
        if progress.stage == "train" and progress.done % 10 == 0:
            seen[progress.done] = (tmp_path / "run" / "checkpoint" / "files" / "memory.f32").read_bytes()

    run(config, tmp_path / "run", prepared=world, watch=watch)
    assert Kept(tmp_path / "run" / "checkpoint").rounds() == [10, 20]
    for round, estimates in seen.items():
        kept = tmp_path / "run" / "checkpoint" / "kept" / str(round)
        assert (kept / "files" / "memory.f32").read_bytes() == estimates
        with np.load(kept / "state.npz") as state:
            assert state["round"] == round


# --- what a command line asks ---


def test_overrides_change_a_run_and_its_own_file_is_taken_if_none_is_given(finished: Path, world: World) -> None:
    assert asked(finished, None, []) == (world.config, {})
    given, changes = asked(finished, None, ["train.lr=0.5", "train.k=6", "workers=2"])
    assert changes == {"train.lr": 0.5}  # k is as it was, and workers change nothing
    assert (given.train.lr, given.workers, given.rounds) == (0.5, 2, 5)


def test_words_that_a_run_began_with_are_no_changes(tmp_path: Path) -> None:
    words = ["train.spread=auto", "train.bytes_up=64", "train.passes=9", "rounds=7"]
    (tmp_path / "config.toml").write_text(load(None, words).to_toml())
    assert asked(tmp_path, None, words) == (load(None, words), {})


def test_another_file_is_refused_and_the_way_to_change_is_said(finished: Path, world: World) -> None:
    with pytest.raises(
        RunError, match=r"another config \(train.lr\); resume it with its own, or change it by train.lr="
    ):
        run(world.config.with_({"train.lr": 0.7}), finished, resume=True, prepared=world)

"""Runs: the same bits whoever runs them and however often they are killed; and what stops them, told in a sentence."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from foreseed.config import Config, load
from foreseed.engine import Engine, ForeseedError, Samples
from foreseed.engine.program import load as load_model
from foreseed.methods.workers import Workers
from foreseed.runs import Progress, RunError, Summary
from foreseed.simulate import run_simulated as run
from tests.runs.kills import go_on, killed_often
from tests.simulate.small import WITH_BATCH_NORM, World, make_world, outcome, rows_of, small_config, write_bars

ARMS: dict[str, dict[str, Any]] = {
    "ntk-baffle": {"train__ema": 0.5, "train__clip": 2.0},
    "adam": {"train__optimiser": "adam", "train__seeds": "shared", "train__direction": "rademacher"},
    "exact": {"engine": "exact", "train__spread": 2, "train__momentum": 0.0},
    "local-steps": {"method": "baffle", "train__local_steps": 2, "train__difference": "central"},
    "batch-norm": {"model__name": WITH_BATCH_NORM},
    "memory": {"train__memory": True, "train__rate": "noise", "train__memory_bytes": 4 * 4 * 301},
    "one-bit": {"train__bits": 1, "train__spread": 3},
    "fedavg": {"method": "fedavg", "train__ema": 0.5},
    "fedsgd": {"method": "fedsgd", "train__memory": True, "train__ema": 0.5},
    "ntk-fedavg": {"method": "ntk-fedavg", "model__name": WITH_BATCH_NORM},
    "zerofl": {"method": "zerofl", "train__ema": 0.5, "zerofl__uplink": "diff-on-top-k"},
    "fedtiny": {"method": "fedtiny", "model__name": WITH_BATCH_NORM, "fedtiny__every": 2, "fedtiny__until": 5},
    "feddst": {
        "method": "feddst",
        "train__ema": 0.5,
        "train__epochs": 2,
        "feddst__every": 1,
        "feddst__ratio": 0.5,
        "feddst__epoch": 1,
    },
    "feddst-compat": {
        "method": "feddst",
        "model__name": WITH_BATCH_NORM,
        "train__epochs": 5,
        "feddst__every": 1,
        "feddst__ratio": 0.5,
        "feddst__decay_end": 5,
        "feddst__compat": True,
    },
    "prunefl": {
        "method": "prunefl",
        "train__ema": 0.5,
        "model__name": WITH_BATCH_NORM,
        "prunefl__every": 2,
        "prunefl__initial_rounds": 12,
    },
    "lotteryfl": {"method": "lotteryfl", "model__name": WITH_BATCH_NORM, "train__ema": 0.5, "lotteryfl.threshold": 0.0},
    "fedkseed": {"method": "fedkseed", "fedkseed.pool": 40, "train__local_steps": 4, "train__ema": 0.5},
    "batch-level": {
        "method": "baffle-original",
        "data__per_round": 6,
        "train__optimiser": "adam",
        "train__ema": 0.5,
        "data__partition": "iid",
        "train__batch": 10,
    },
    "epoch-level": {
        "method": "baffle-original",
        "data__per_round": 6,
        "train__optimiser": "adam",
        "train__ema": 0.5,
        "baffle-original.level": "epoch",
    },
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the same bits ---


@pytest.mark.parametrize("arm", ARMS)
def test_one_two_and_three_workers_come_to_the_same_bits(arm: str, bars: Path, tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        run(small_config(bars, workers=workers, **ARMS[arm]), tmp_path / str(workers))
    assert outcome(tmp_path / "1") == outcome(tmp_path / "2") == outcome(tmp_path / "3")
    assert len(rows_of(tmp_path / "1")) == 5


def test_the_digits_that_are_built_in_are_learnt_with_the_same_bits(tmp_path: Path) -> None:
    few = [
        "rounds=3", "eval_every=2", "data.devices=8", "data.per_round=2", "train.k=4", "train.lr=0.001",
        "prune.iterations=2", "prune.redraws=1", "prune.batch=8",
    ]  # fmt: skip
    for workers in (1, 2):
        summary = run(load(None, [*few, f"workers={workers}"]), tmp_path / str(workers))
    assert outcome(tmp_path / "1") == outcome(tmp_path / "2")
    assert summary.n_live < 0.11 * summary.n_total
    assert [row["accuracy"] is None for row in rows_of(tmp_path / "1")] == [True, False, False]


def test_seeds_make_different_runs(bars: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(small_config(bars, seed=seed), tmp_path / str(seed))
    assert (
        outcome(tmp_path / "0")["state"]["state.server.values"]
        != outcome(tmp_path / "1")["state"]["state.server.values"]
    )


# --- resuming ---


class Kill(BaseException):
    """Nobody catches it, as nobody catches SIGKILL."""


@pytest.mark.parametrize("arm", ARMS)
def test_run_interrupted_after_every_round_equals_an_uninterrupted_one(arm: str, bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, **ARMS[arm])
    world = make_world(config)
    run(config, tmp_path / "whole", prepared=world)

    def stop(progress: Progress) -> None:
        raise Kill

    for rounds in range(1, 6):
        with pytest.raises(Kill):
            run(config, tmp_path / "parts", resume=rounds > 1, watch=stop, prepared=world)
        assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")[:rounds]
    run(config, tmp_path / "parts", resume=True, prepared=world)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("arm", ["ntk-baffle", "memory", "fedavg"])
@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "link"])
def test_run_stopped_at_any_write_equals_an_uninterrupted_one(
    arm: str, call: str, bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(bars, rounds=2, **ARMS[arm])
    world = make_world(config)
    run(config, tmp_path / "whole", prepared=world)
    expected, real, stops = outcome(tmp_path / "whole"), getattr(os, call), 0
    while True:
        left = stops

        def stopping(*arguments: Any) -> None:
            nonlocal left
            if not left:
                raise Kill
            left -= 1
            real(*arguments)

        folder = tmp_path / str(stops)
        monkeypatch.setattr(os, call, stopping)
        try:
            run(config, folder, prepared=world)
            break
        except Kill:
            monkeypatch.setattr(os, call, real)
        go_on(config, folder)
        assert outcome(folder) == expected
        stops += 1
    # The config, the metrics, the model and the summary at least, and in each round a line and a checkpoint. A memory
    # has to be copied, and is not in so few rounds; else every checkpoint has a second name.
    assert stops >= (7 if call in ("fsync", "replace") else 0 if arm == "memory" else 2)


@pytest.mark.parametrize("arm", ["ntk-baffle", "memory", "fedavg"])
def test_run_killed_at_random_moments_equals_an_uninterrupted_one(arm: str, bars: Path, tmp_path: Path) -> None:
    # Many more rounds than pass in the moment before a kill, so that on a fast machine too it strikes in between.
    config = small_config(bars, rounds=250, eval_every=1, **ARMS[arm])
    run(config, tmp_path / "whole")
    random = Random(7)
    moments = [0, *sorted(random.sample(range(1, 100), 4))]
    left = killed_often(config, tmp_path / "killed", moments, random)
    assert any(0 < lines < 250 for lines in left)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_half_a_line_of_metrics_is_dropped(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars)
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    with open(tmp_path / "cut" / "metrics.jsonl", "ab") as metrics:
        metrics.write(b'{"round": 6, "lr": 0.0')
    run(config, tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_finished_run_can_be_resumed_and_does_nothing(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars)
    summary = run(config, tmp_path / "run")
    before = files(tmp_path / "run")
    assert run(config, tmp_path / "run", resume=True).final_accuracy == summary.final_accuracy
    after = files(tmp_path / "run")
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert changed <= {"summary.json"}  # how long pruning took


def test_workers_and_name_may_change_on_resuming(bars: Path, tmp_path: Path) -> None:
    run(small_config(bars), tmp_path / "run")
    run(small_config(bars, workers=2, name="other"), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["name"] == "other"


# --- refusals ---


def test_folder_that_holds_anything_is_refused_and_left_alone(bars: Path, tmp_path: Path) -> None:
    run(small_config(bars, rounds=1), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    for folder in (tmp_path / "run", tmp_path / "other"):
        before = files(folder)
        with pytest.raises(RunError, match="exists and is not empty; choose another --out, or go on with --resume"):
            run(small_config(bars, rounds=1), folder)
        assert files(folder) == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model__name": "no_such_module:net"}, "cannot import"),
        ({"model__name": "tests.runs.test_runs:not_a_model"}, "not_a_model"),
        ({"data__devices": 60, "data__min_size": 50}, "min_size"),
        ({"train__memory": True, "train__memory_bytes": 10}, "memory_bytes"),
        ({"track__to": "no_such_module:tracker"}, "no_such_module"),
    ],
)
def test_run_that_is_refused_leaves_nothing_and_the_corrected_one_starts(
    change: dict[str, Any], complaint: str, bars: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "runs" / "run"
    with pytest.raises(ForeseedError, match=complaint):
        run(small_config(bars, rounds=1, **change), folder)
    assert list(tmp_path.iterdir()) == []
    assert run(small_config(bars, rounds=1), folder).rounds == 1


def not_a_model(classes: int) -> Any:
    return lambda images: images


def test_run_that_is_stopped_while_it_prunes_leaves_nothing(bars: Path, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        assert progress.stage == "prune"
        raise KeyboardInterrupt

    (tmp_path / "run").mkdir()  # a folder that was there stays
    with pytest.raises(KeyboardInterrupt):
        run(small_config(bars), tmp_path / "run", watch=stop)
    assert list((tmp_path / "run").iterdir()) == []


def test_folder_that_is_empty_is_taken(bars: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert run(small_config(bars, rounds=1), tmp_path / "run").rounds == 1


def test_folder_that_cannot_be_made_is_told(bars: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=r"cannot make a run folder there .* choose another --out"):
            run(small_config(bars), folder)
    assert (tmp_path / "file").read_text() == "no folder"


def test_nothing_to_resume_is_told(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run to resume there; start it without --resume"):
        run(small_config(bars), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "key"),
    [({"train__lr": 0.02}, "train.lr"), ({"seed": 1}, "seed"), ({"rounds": 9}, "rounds"), ({"train__k": 7}, "train.k")],
)
def test_resuming_with_another_config_names_the_key(
    change: dict[str, Any], key: str, bars: Path, tmp_path: Path
) -> None:
    run(small_config(bars, rounds=1), tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(RunError, match=rf"another config \({key}\); resume it with its own"):
        run(small_config(bars, **{"rounds": 1} | change), tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"not a checkpoint"])
def test_checkpoint_that_is_damaged_is_told(content: bytes, bars: Path, tmp_path: Path) -> None:
    config = small_config(bars)
    run(config, tmp_path / "run")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "checkpoint" / "state.npz").write_bytes(content)
    with pytest.raises(ForeseedError, match=r"state\.npz: not a checkpoint that can be read .* start the run anew"):
        run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("lost", ["metrics.jsonl", "checkpoint/state.npz"])
def test_run_that_lost_a_file_is_not_begun_again_over_the_rest(lost: str, bars: Path, tmp_path: Path) -> None:
    config = small_config(bars)
    run(config, tmp_path / "run")
    (tmp_path / "run" / lost).unlink()
    before = files(tmp_path / "run")
    with pytest.raises(RunError, match="files of this run are lost; start it anew in another folder"):
        run(config, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before


def test_run_whose_world_cannot_be_made_again_is_not_resumed(bars: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.npz"
    shutil.copy(bars, mine)
    config = small_config(mine)
    run(config, tmp_path / "run")
    write_bars(mine, train=119)
    before = files(tmp_path / "run")
    with pytest.raises(
        RunError, match=r"its data and partition and initial values differ from what it began with; .* env\.json"
    ):
        run(config, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before


def test_more_directions_than_fit_a_message_are_refused_before_the_first_round(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, train__k=2**16, train__local_steps=2)
    with pytest.raises(ForeseedError, match=r"train\.k 65536 x train\.local_steps 2"):
        run(config, tmp_path / "run")


# --- runs that blow up ---

TOO_LARGE: dict[str, dict[str, Any]] = {
    "ntk-baffle": {"train__lr": 1e6, "train__sigma": 1.0},
    "exact": {"engine": "exact", "train__lr": 1e6},
    "fedavg": {"method": "fedavg", "train__lr": 1e4, "train__batch": 30},
}


@pytest.mark.parametrize("arm", TOO_LARGE)
def test_run_that_blows_up_says_where_and_what_to_do_and_keeps_its_last_good_round(
    arm: str, bars: Path, tmp_path: Path
) -> None:
    config = small_config(bars, rounds=50, eval_every=50, name="wild", **TOO_LARGE[arm])
    with pytest.raises(RunError, match=r"wild, round \d+: .*not finite|wild, round \d+: .*a loss of") as first:
        run(config, tmp_path / "run")
    assert "lower" in str(first.value)
    rows = rows_of(tmp_path / "run")
    assert f"round {len(rows) + 1}:" in str(first.value)
    assert not (tmp_path / "run" / "summary.json").exists()
    with np.load(tmp_path / "run" / "checkpoint" / "state.npz") as state:
        assert int(state["round"]) == len(rows) > 0
        assert all(np.isfinite(state[name]).all() for name in state.files)
    with pytest.raises(RunError) as second:
        run(config, tmp_path / "run", resume=True)
    assert str(second.value) == str(first.value)
    assert rows_of(tmp_path / "run") == rows


def test_evaluation_that_blows_up_says_where(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(bars, name="wild", eval_every=3)

    def refuse(*_: Any) -> None:
        raise ForeseedError("the loss is not finite")

    monkeypatch.setattr(Workers, "evaluate", refuse)
    with pytest.raises(RunError, match="wild, round 3: the loss is not finite"):
        run(config, tmp_path / "run")
    assert len(rows_of(tmp_path / "run")) == 2


# --- what a run leaves behind ---


@pytest.fixture(scope="module")
def finished(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, World, Path, Summary]:
    config = small_config(bars, train__ema=0.25, eval_every=1)
    world, folder = make_world(config), tmp_path_factory.mktemp("finished") / "run"
    return config, world, folder, run(config, folder, prepared=world)


def test_folder_holds_all_that_was_promised(finished: tuple[Config, World, Path, Summary]) -> None:
    config, _, folder, summary = finished
    expected = {"config.toml", "env.json", "metrics.jsonl", "summary.json", "model.fsp", "mask.npz"}
    assert expected | {"checkpoint/state.npz"} <= files(folder).keys()
    assert load(folder / "config.toml") == config
    assert json.loads((folder / "summary.json").read_text()) == json.loads(summary.model_dump_json(exclude_unset=True))
    assert json.loads((folder / "env.json").read_text()).keys() >= {"foreseed", "torch", "instruction_set"}


def test_model_is_that_of_the_last_round(finished: tuple[Config, World, Path, Summary]) -> None:
    _, world, folder, summary = finished
    model = load_model(folder / "model.fsp")
    assert model.program.bytes == world.task.program.bytes
    samples = Samples.records(world.task.test, world.task.program.image_bytes)
    loss, correct = Engine(model.program).loss(model.values, samples)
    assert correct / samples.count == summary.final_accuracy
    assert loss / samples.count == pytest.approx(rows_of(folder)[-1]["loss"], rel=1e-12)


def test_metrics_have_the_keys_that_were_promised(finished: tuple[Config, World, Path, Summary]) -> None:
    keys = {
        "round", "lr", "train_loss", "devices", "samples", "forward_passes", "flops", "dense_flops", "bytes_up",
        "bytes_down", "participants", "accuracy", "loss", "ema_accuracy", "ema_loss", "snr", "remembered",
        "left_out", "n_live", "personal_accuracy", "personal_density",
    }  # fmt: skip
    rows = rows_of(finished[2])
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row.keys() == keys for row in rows)
    assert [row["lr"] for row in rows] == pytest.approx([0.01 * 0.998**i for i in range(5)])


def test_summary_adds_the_rounds_up(finished: tuple[Config, World, Path, Summary]) -> None:
    _, world, folder, summary = finished
    rows = rows_of(folder)
    for key in ("flops", "dense_flops", "forward_passes", "bytes_up", "bytes_down"):
        assert getattr(summary.total, key) == sum(row[key] for row in rows)
        assert getattr(summary.per_device_round, key) == getattr(summary.total, key) / 15
    accuracies = [row["accuracy"] for row in rows]
    assert summary.final_accuracy == accuracies[-1]
    assert summary.max_accuracy == max(accuracies)
    assert summary.last_mean_accuracy == pytest.approx(np.mean(accuracies))
    assert summary.final_ema_accuracy == rows[-1]["ema_accuracy"]
    assert summary.partition.sizes == tuple(world.population.partition.sizes)
    assert sum(layer.n_weights for layer in summary.layers) <= summary.n_live == world.task.program.n_live


@pytest.mark.parametrize("method", ["ntk-baffle", "fedavg"])
def test_ema_is_the_moving_average_of_the_values(
    method: str, bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(bars, method=method, train__ema=0.75, eval_every=1)
    world, seen = make_world(config), []

    def keep(progress: Progress) -> None:
        with np.load(tmp_path / "run" / "checkpoint" / "state.npz") as state:
            seen.append((next(state[name] for name in state.files if name.endswith(".values")), state["state.ema"]))

    run(config, tmp_path / "run", watch=keep, prepared=world)
    average = world.task.values.astype(np.float64)
    samples = Samples.records(world.task.test, world.task.program.image_bytes)
    for row, (values, ema) in zip(rows_of(tmp_path / "run"), seen, strict=True):
        average = 0.75 * average + 0.25 * values
        np.testing.assert_allclose(ema, average, rtol=1e-5, atol=1e-7)
        loss, correct = Engine(world.task.program).loss(ema, samples)
        assert row["ema_accuracy"] == correct / samples.count
        assert row["ema_loss"] == pytest.approx(loss / samples.count)
        assert row["ema_loss"] != row["loss"]


def test_batch_norm_run_sends_statistics_and_ends_with_them(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars, model__name=WITH_BATCH_NORM)
    summary = run(config, tmp_path / "norm")
    model = load_model(tmp_path / "norm" / "model.fsp")
    assert len(model.stats) == 8
    assert all(variance > 0 for variance in model.stats[4:])
    assert list(model.stats) != [0] * 4 + [1] * 4
    losses = 4 * (1 + config.train.k)
    for row in rows_of(tmp_path / "norm"):
        assert row["bytes_up"] >= 3 * (losses + 4 * 8)
        assert row["forward_passes"] == row["samples"] * (config.train.k + 2)
    assert summary.memory.batch == config.train.batch


def test_progress_is_told_of_pruning_and_of_every_round(bars: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    run(small_config(bars), tmp_path / "run", watch=told.append)
    assert [(p.done, p.total) for p in told if p.stage == "prune"] == [(1, 2), (2, 2)]
    rounds = [p for p in told if p.stage == "train"]
    assert [(p.done, p.total) for p in rounds] == [(i, 5) for i in range(1, 6)]
    accuracies = [p.accuracy for p in rounds]
    assert accuracies[0] is None
    assert accuracies[1] == accuracies[2] == rounds[1].row.accuracy
    assert accuracies[4] == rounds[4].row.accuracy


# --- many devices ---


def test_a_hundred_thousand_devices_take_no_memory_of_their_own(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), 100_000
    images, labels = rng.integers(0, 256, (n, 1, 16, 16), dtype=np.uint8), rng.integers(0, 4, n)
    np.savez(
        tmp_path / "many.npz", train_images=images, train_labels=labels,
        test_images=images[:50], test_labels=labels[:50],
    )  # fmt: skip
    del images
    config = small_config(
        tmp_path / "many.npz", rounds=3, data__devices=n, data__per_round=10, data__partition="iid", method="baffle"
    )
    world = make_world(config)
    tracemalloc.start()
    run(config, tmp_path / "run", prepared=world)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row["devices"] for row in rows_of(tmp_path / "run")] == [10, 10, 10]
    # The round that each device last saw (4 bytes), a few copies of it, and its size in the summary.
    assert peak < 200 * n


def test_world_that_is_lent_to_several_runs_stays_as_it_is(bars: Path, tmp_path: Path) -> None:
    config = small_config(bars)
    world = make_world(config)
    before = world.task.values.copy()
    for method in ("ntk-baffle", "ntk-fedavg"):
        run(config.with_({"method": method}), tmp_path / method, prepared=world.changed(method=method))
        np.testing.assert_array_equal(world.task.values, before)

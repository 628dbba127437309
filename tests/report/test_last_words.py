"""The last words follow from the numbers, and the commands below them work as they are printed."""

import json
import shlex
from pathlib import Path

import pytest

from foreseed.cli.experiment import _arms, config_of, finish
from foreseed.report import closing
from tests.report.runs import edit_summary, write_run

ARMS = {"ntk-baffle": 0.941, "baffle": 0.871, "fedavg": 0.97, "random-mask": 0.929}


def write_arms(root, accuracies=ARMS, seeds=(0,), spread=0.0):
    """The demo's arms, with the given accuracies: the seeds lie `spread` apart."""
    runs = []
    for name, accuracy in accuracies.items():
        method, pruner = ("ntk-baffle", "random") if name == "random-mask" else (name, "ntk-rand")
        for seed in seeds:
            called = name if len(seeds) == 1 else f"{name}-s{seed}"
            runs.append(write_run(root / called, method, seed, name=called, rounds=30, pruner=pruner))
            edit_summary(runs[-1], last_mean_accuracy=accuracy + spread * (seed - 1))
    return runs


def said(runs, folder=Path("nowhere/all")):
    return [sentence.replace("\u00a0", " ") for sentence in closing(runs, folder).sentences]


def test_the_demo_is_told_in_six_sentences(tmp_path):
    reached, learner, dense, control, traffic, seeds = said(write_arms(tmp_path))
    assert reached.startswith(
        "ntk-baffle reached 94.1 % (mean of the last 5 tests) with forward passes alone: a device needs "
    )
    assert reached.endswith(
        "of memory for an image at a time, fedavg’s backpropagation 2.99 MB for 32 images at a time."
    )
    assert learner.startswith("fedavg came to 97.0 %, 2.9 points more than ntk-baffle; it took 0.")
    assert dense.startswith("baffle, which keeps every weight, came to 87.1 %, 7.0 points less than ntk-baffle; ")
    assert control.startswith(
        "A random mask of the same size came to 92.9 %, 1.2 points less than ntk-baffle; it took "
    )
    assert traffic.startswith("A device of ntk-baffle sends 230 B a round and receives ")
    assert seeds == "All this is one seed: with another, small differences may turn."


def test_costs_are_those_of_the_summaries(tmp_path):
    runs = write_arms(tmp_path)
    for run, factor in zip(runs, (3, 6, 1, 3), strict=True):
        costs = json.loads((run / "summary.json").read_text())["total"]
        edit_summary(run, total=costs | {"flops": 100 * factor, "bytes_up": factor, "bytes_down": 9 * factor})
    _, learner, dense, control, *_ = said(runs)
    assert learner.endswith("it took 0.33 of the FLOPs.")
    assert dense.endswith("ntk-baffle took 0.5 of its FLOPs and 0.5 of its bytes.")
    assert control.endswith("it took 1.0 times the FLOPs.")


@pytest.mark.parametrize(
    ("control", "spread", "words"),
    [
        (0.92, 0.001, "2.1 points less than ntk-baffle"),
        (0.96, 0.001, "1.9 points more than ntk-baffle"),
        (0.93, 0.02, "within the seeds’ spread of ntk-baffle"),
        (0.95, 0.02, "within the seeds’ spread of ntk-baffle"),
        (0.941, 0.0, "the same as ntk-baffle"),
    ],
)
def test_ahead_behind_or_equal_is_judged_by_the_spread_of_the_seeds(tmp_path, control, spread, words):
    runs = write_arms(tmp_path, {"ntk-baffle": 0.941, "random-mask": control}, (0, 1, 2), spread)
    sentences = said(runs)
    (found,) = (sentence for sentence in sentences if sentence.startswith("A random mask"))
    assert f"%, {words}; it took " in found
    assert not any("one seed" in sentence for sentence in sentences)


def test_a_mask_of_another_size_is_no_control_and_another_network_no_rival(tmp_path):
    runs = write_arms(tmp_path, {"ntk-baffle": 0.9, "random-mask": 0.8, "fedavg": 0.95})
    edit_summary(runs[1], density=0.2)
    edit_summary(runs[2], model="resnet20")
    text = " ".join(said(runs))
    assert "of the same size" not in text
    assert "fedavg" not in text
    assert "Of 2 arms, ntk-baffle came highest with 90.0 %, and random-mask lowest with 80.0 %, 10.0 points" in text


def test_one_run_alone_gets_fewer_lines_and_no_comparison(tmp_path):
    for method, lines in (("ntk-baffle", 4), ("baffle", 2), ("fedavg", 2)):
        (run,) = write_arms(tmp_path, {method: 0.9})
        sentences = said([run])
        assert len(sentences) == lines
        assert "points" not in " ".join(sentences)
        assert ("forward passes alone" in sentences[0]) is (method != "fedavg")


def test_devices_that_backpropagate_to_prune_are_not_passed_over(tmp_path):
    (run,) = write_arms(tmp_path, {"ntk-baffle": 0.9})
    cost = json.loads((run / "summary.json").read_text())["pruning"]
    edit_summary(run, pruning=cost | {"bp_free": False, "device_flops": 1e9, "device_bytes_up": 1e6})
    text = " ".join(said([run]))
    assert "with forward passes alone, once its devices had backpropagated to prune" in text
    assert "the devices nothing" not in text


@pytest.mark.parametrize("arms", [list(ARMS), ["ntk-baffle"], ["baffle"], ["fedavg"]])
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_three_commands_go_on_from_the_runs_into_folders_of_their_own(tmp_path, arms, seeds):
    root = tmp_path / "with space"
    runs = write_arms(root, {arm: ARMS[arm] for arm in arms}, seeds)
    (tmp_path / "with space-testbed").mkdir()
    steps = closing(runs, root).steps
    assert len({step.command for step in steps}) == 3
    outs = set()
    for step in steps:
        program, command, *words = shlex.split(step.command)
        assert program == "foreseed"
        options = {}
        while "--out" in words or "--seeds" in words or "--methods" in words:
            at = next(i for i, word in enumerate(words) if word.startswith("--"))
            options[words[at]], words[at : at + 2] = words[at + 1], []
        if command == "compare":
            assert len(_arms(words, options.get("--methods", ""), "", options.get("--seeds", ""))) >= 2
        elif command == "run":
            assert config_of(words).train.spread == 10
        else:
            assert (command, words) in [("testbed", []), ("bench", ["memory"]), ("doctor", [])]
        outs |= {options[option] for option in options if option == "--out"}
        assert not any(Path(out).exists() for out in outs)
    assert len(outs) == sum("--out" in step.command for step in steps)


def test_runs_whose_settings_cannot_be_given_again_still_have_three_commands(tmp_path):
    for run in (write_run(tmp_path / "k=5"), write_run(tmp_path / "run", "of-tomorrow")):
        steps = closing([run], run).steps
        assert len(steps) == 3
        assert not any("config.toml" in step.command for step in steps)


def test_the_last_words_are_said_to_people_and_not_to_programs(tmp_path, capsys):
    runs = write_arms(tmp_path / "all", {"ntk-baffle": 0.9, "fedavg": 0.95})
    finish(runs, tmp_path / "all", False, None, explained=True)
    shown = capsys.readouterr().out
    for sentence in said(runs, tmp_path / "all"):
        assert sentence in " ".join(shown.replace("\u00a0", " ").split())
    # A command stands on one line, to be copied.
    assert [f"  {step.command}" for step in closing(runs, tmp_path / "all").steps] == [
        line for line in shown.splitlines() if line.startswith("  foreseed ")
    ]
    finish(runs, tmp_path / "all", False, None)
    assert "Try next" not in capsys.readouterr().out
    finish(runs, tmp_path / "all", True, None, explained=True)
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert [arm["numbers"]["last_mean_accuracy"]["mean"] for arm in arms] == [0.9, 0.95]

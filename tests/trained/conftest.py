"""Two finished runs on the digits: a pruned LeNet-5, and a pruned ResNet-20 with BatchNorm."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreseed.data import HeldOut, load_held_out
from foreseed.simulate import run_simulated
from foreseed.trained import Trained, read_trained
from tests.runs.small import tiny

RUNS = {
    "lenet5": ["prune.pruner=ntk-rand", "prune.iterations=2", "prune.redraws=1", "train.ema=0.5", "train.lr=0.1"],
    "resnet20-batch": [
        "rounds=1", "eval_every=1", "model.name=resnet20", "model.norm=batch", "model.activation=relu",
        "data.devices=20", "data.per_round=1", "train.k=1", "prune.density=0.3",
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        # Pictures and processes to measure take longer than the rest.
        patch.setattr("foreseed.simulate.experiment.picture", lambda *_: None)
        patch.setattr("foreseed.meter.device.process_peak_bytes", lambda *_: None)
        for name, overrides in RUNS.items():
            run_simulated(tiny(*overrides), folder / name)
    return {name: folder / name for name in RUNS}


@pytest.fixture(params=RUNS)
def trained(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Trained:
    return read_trained(runs[request.param])


@pytest.fixture(scope="session")
def tests() -> HeldOut:
    return load_held_out("digits")

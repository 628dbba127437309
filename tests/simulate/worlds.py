"""What the shipped experiments start from, by hashes: the section "worlds" of `docs/vectors.json`.

`python -m tests.simulate.worlds` makes all of them again and says which differ; with `--write` it writes them. Data
sets that must be downloaded are not needed: partitions are those of as many labels in turn. Models whose pruning takes
minutes are named by their weights before it (`tests.prune.test_everywhere` prunes them in a few steps). The demo's
worlds have the values after three of their rounds as well, which any machine with fused multiply-adds must come to.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from foreseed.config import Config, load, methods
from foreseed.methods import Task
from foreseed.models import build
from foreseed.prune import apply_mask, foresight, rescale
from foreseed.simulate import Population, SimulatedDevices, prepare
from foreseed.simulate.population import partition_of
from tests.engine.vectors import PATH, write
from tests.prune.everywhere import SHAPE, digest

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "experiments").rglob("*.toml"))


def is_portable(config: Config) -> bool:
    """Whether a run is the same bits everywhere: real finite differences, not torch's backpropagation."""
    return not config.is_bp and config.engine == "difference"


def learn_a_little(task: Task, population: Population) -> str:
    """The hash of the values after three rounds of real finite differences."""
    method = methods()[task.config.method]
    devices, state = SimulatedDevices(task, population), method.init(task)
    try:
        for _ in range(3):
            method.round(task, devices, state)
    finally:
        devices.close()
    return _hash(state.values)


def parts_of(experiment: str) -> dict[str, str]:
    """The hashes of an experiment's world."""
    config = load(ROOT / experiment)
    if config.data.set == "digits":
        task, population = prepare(config)
        learnt = {"values after 3 rounds": learn_a_little(task, population)} if is_portable(config) else {}
        return population.digests() | task.digests() | learnt
    classes = 100 if config.data.set == "cifar100" else 10
    partition = partition_of(config, np.arange(50_000) % classes)
    return {"partition": _hash(*partition.indices)} | _mask_and_values(
        *config.model.model_dump(exclude={"weights"}).values(),
        classes,
        config.seed,
        config.effective_density,
        config.prune.model_dump_json(),
    )


@cache
def _mask_and_values(
    name: str, activation: str, norm: str, init: str, classes: int, seed: int, density: float, prune: str
) -> dict[str, str]:
    model = build(name, SHAPE, classes, activation=activation, norm=norm, init=init, seed=seed)
    if name != "lenet5" or density == 1:
        return {"initial values": _weights(model)}
    settings: dict[str, Any] = json.loads(prune)
    del settings["density"]
    settings["cost_power"] *= settings.pop("cost") == "flops"
    scale = rescale if settings.pop("rescale") else apply_mask
    mask = foresight(model, density, input_shape=SHAPE, seed=seed, **settings).mask
    return {"mask": digest(mask), "initial values": _weights(scale(model, mask))}


def _weights(model: nn.Module) -> str:
    return _hash(*(p.detach().numpy() for p in model.parameters()))


def _hash(*arrays: Any) -> str:
    return hashlib.blake2b(b"".join(array.tobytes() for array in arrays), digest_size=16).hexdigest()


def main() -> None:
    worlds = []
    for experiment in EXPERIMENTS:
        worlds.append({"experiment": experiment, **parts_of(experiment)})
        print(json.dumps(worlds[-1]), flush=True)
    if "--write" in sys.argv:
        write(worlds)
    elif worlds != json.loads(PATH.read_text())["worlds"]:
        raise SystemExit("some differ from docs/vectors.json")


if __name__ == "__main__":
    main()

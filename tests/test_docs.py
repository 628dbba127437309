"""What the docs say is so: names exist, examples run, generated pages are current."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import nn

from foreseed.config import Config, load, methods, withdraw
from foreseed.config.reference import reference
from foreseed.data import load_held_out
from foreseed.engine import load as load_model
from foreseed.methods import ntk_baffle
from foreseed.prune import PRUNERS
from foreseed.report import write_report
from foreseed.runs import Progress
from foreseed.simulate import SimulatedDevices, prepare, run_simulated

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md"))]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def imported(path: Path, name: str) -> ModuleType:
    """A file as a module."""
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resolve(name: str) -> Any:
    """What a dotted name stands for: the longest module that it begins with, then attributes or a class's fields."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if attribute in getattr(found, "__annotations__", {}):
                found = found.__annotations__[attribute]
            else:
                found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_are_real(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`(foreseed(?:\.\w+)+)", text):
        resolve(name)
    for path in re.findall(r"`((?:src|csrc|tests|docs|experiments|tools)/[\w./-]*)`", text):
        assert (DOCS.parent / path).exists() or "regrow" in path, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_config_reference_is_current() -> None:
    assert (DOCS / "config.md").read_text() == reference(), "python -m foreseed.config.reference > docs/config.md"


def test_picture_of_the_rooms_is_current() -> None:
    rooms = imported(DOCS.parent / "tools" / "rooms.py", "rooms")
    assert (DOCS / "rooms.svg").read_text() == rooms.picture(), "python tools/rooms.py > docs/rooms.svg"


def tiny(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3), nn.Hardswish(), nn.Flatten(), nn.Linear(4 * 4 * 4, 8), nn.Hardswish(),
        nn.Linear(8, classes),
    )  # fmt: skip


@pytest.fixture
def bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data set of docs/extend/data.md, made as it says there."""
    monkeypatch.chdir(tmp_path)
    exec(blocks("extend/data.md")[0], {})
    return tmp_path / "bars.npz"


def test_data_example(bars: Path) -> None:
    assert len(load_held_out(bars).images) == 60
    assert len(list((bars.parent / "shards").glob("device-*.bin"))) == 6


def small_config(bars: Path, **changes: Any) -> Config:
    base = {
        "rounds": 2, "eval_every": 1, "workers": 1, "data.set": str(bars), "data.devices": 6, "data.per_round": 3,
        "data.min_size": 4, "model.name": "tests.test_docs:tiny", "prune.density": 0.3, "prune.iterations": 2,
        "prune.redraws": 1, "prune.batch": 8, "train.batch": 8, "train.ema": 0.5,
    }  # fmt: skip
    return load().with_(base | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture
def regrow(tmp_path: Path) -> Iterator[ModuleType]:
    """The method of docs/extend/method.md."""
    path = tmp_path / "regrow.py"
    path.write_text(blocks("extend/method.md")[0])
    yield imported(path, "regrow")
    withdraw("regrow")
    del sys.modules["regrow"]


class Killed(BaseException):
    pass


def kill(progress: Progress) -> None:
    if progress.stage == "train":
        raise Killed


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be equal in two runs that are equal, but for the time they took."""
    with np.load(folder / "checkpoint" / "state.npz") as file:
        state = {name: file[name].tobytes() for name in file.files}
    rows = re.sub(r'"seconds":[^,]*,', "", (folder / "metrics.jsonl").read_text())
    return {"state": state, "rows": rows, "model": (folder / "model.fsp").read_bytes()}


def test_method_example(bars: Path, regrow: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pictures and processes to measure take longer than the rest.
    monkeypatch.setattr("foreseed.simulate.experiment.picture", lambda *_: None)
    monkeypatch.setattr("foreseed.meter.device.process_peak_bytes", lambda *_: None)
    config = small_config(bars, method="regrow", regrow__every=1)
    assert "[regrow]" in config.to_toml()
    task, _ = prepared = prepare(config)

    summary = run_simulated(config, tmp_path / "whole", prepared=prepared)
    model = load_model(tmp_path / "whole" / "model.fsp")
    assert model.program.bytes != task.program.bytes
    assert model.program.n_live == task.program.n_live == summary.n_live
    assert summary.final_ema_accuracy is not None

    with pytest.raises(Killed):
        run_simulated(config, tmp_path / "killed", prepared=prepared, watch=kill)
    run_simulated(config, tmp_path / "killed", prepared=prepare(config), resume=True)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")

    page = write_report([tmp_path / "whole", tmp_path / "killed"], tmp_path)
    assert "regrow" in page.read_text()


def test_the_method_is_gone_again() -> None:
    assert "regrow" not in methods()
    assert "regrow" not in Config.model_fields


def test_pruner_example() -> None:
    scorer, use = blocks("extend/pruner.md")
    scope: dict[str, Any] = {}
    try:
        exec(scorer, scope)
        exec(use, scope)
    finally:
        PRUNERS.pop("lamp", None)
    found, weights = scope["found"], sum(live.numel() for live in scope["found"].mask.values())
    assert sum(int(live.sum()) for live in found.mask.values()) == round(0.1 * weights)
    assert all(0 < density < 1 for density in found.densities.values())


def test_transport_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(blocks("extend/transport.md")[0], scope)
    task, simulated = scope["task"], ntk_baffle.init(scope["task"])
    devices = SimulatedDevices(task, scope["population"])
    try:
        ntk_baffle.round(task, devices, simulated)
    finally:
        devices.close()
    assert scope["state"].values.tobytes() == simulated.values.tobytes() != task.values.tobytes()

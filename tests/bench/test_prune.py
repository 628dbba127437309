"""The pruning benchmark: both precisions do the same work, and are timed in turns."""

from __future__ import annotations

import pytest

from foreseed.bench import prune
from foreseed.engine import ForeseedError
from foreseed.prune import Settings


@pytest.mark.parametrize("model", ["lenet5-hardswish", "resnet20-batch"])
def test_every_contender_is_timed(model: str) -> None:
    said: list[str] = []
    settings = Settings((3, 32, 32), redraws=1, batch=3)
    result = prune.bench_prune([model], 1e-3, settings, progress=said.append)
    (row,) = result["models"]
    assert said == [model] == [row["model"]]
    assert set(row["seconds"]) == {"float64", "float32", "float32, one thread"}
    for name, ratio in row["ratio"].items():
        assert ratio == pytest.approx(row["seconds"]["float64"] / row["seconds"][name])


def test_contenders_that_do_other_work_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "_float32_iteration", lambda *_: 1.0)
    with pytest.raises(ForeseedError, match="so the times say nothing"):
        prune.bench_prune(["lenet5-relu"], 1e-3, Settings((3, 32, 32), redraws=1, batch=3))


def test_models_are_named() -> None:
    assert prune.parse_models(None) == list(prune.MODELS)
    with pytest.raises(ForeseedError, match="no 'lenet6'; expected some of lenet5-relu,"):
        prune.parse_models("lenet5-relu,lenet6")

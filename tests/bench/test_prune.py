"""The pruning benchmark: all contenders do the same work, and are timed in turns."""

from __future__ import annotations

import pytest

from foreseed.bench import prune
from foreseed.engine import ForeseedError
from foreseed.models import build
from foreseed.prune import Settings, convolution, dense_mask


@pytest.mark.parametrize("model", ["lenet5-hardswish", "resnet20-batch"])
def test_every_contender_is_timed(model: str) -> None:
    said: list[str] = []
    result = prune.bench_prune([model], [1.0, 0.2], 1e-3, 1, 3, progress=said.append)
    assert result["settings"] == {"redraws": 1, "batch": 3}
    assert said == [f"{model}, density 1", f"{model}, density 0.2"]
    assert [(row["model"], row["density"]) for row in result["models"]] == [(model, 1.0), (model, 0.2)]
    for row in result["models"]:
        assert set(row["seconds"]) == {"live weights", "torch", "float32", "float32, one thread"}
        for name, ratio in row["ratio"].items():
            assert ratio == pytest.approx(row["seconds"][name] / row["seconds"]["live weights"])


@pytest.mark.parametrize("contender", ["_float64_iteration", "_float32_iteration"])
def test_contenders_that_do_other_work_are_not_compared(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, contender, lambda *_: 1.0)
    with pytest.raises(ForeseedError, match="the times say nothing"):
        prune.bench_prune(["lenet5-relu"], [1.0], 1e-3, 1, 3)


def test_torch_multiplies_all_weights_as_it_does_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name="resnet20", in_shape=(3, 32, 32), classes=10, norm="batch")
    settings = Settings((3, 32, 32), redraws=1, batch=3)
    monkeypatch.setattr(convolution, "_convolved", lambda *_, **__: pytest.fail("live weights alone"))
    assert prune._float64_iteration(model, dense_mask(model), settings) > 0


def test_models_are_named() -> None:
    assert prune.parse_models(None) == list(prune.MODELS)
    with pytest.raises(ForeseedError, match="no 'lenet6'; expected some of lenet5-relu,"):
        prune.parse_models("lenet5-relu,lenet6")

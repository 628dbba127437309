"""Presets and budgets: settings by what a user of a small device knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreseed.config import ConfigError, load
from foreseed.config.presets import PRESETS
from foreseed.engine.types import code_bytes, forward_passes
from foreseed.wire import Reply, encode


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_what_is_not_said_and_is_shown_resolved(name: str, tmp_path: Path) -> None:
    config = load(None, [f"preset={name}", "train.momentum=0.5"])
    for table, keys in PRESETS[name].items():
        for key, value in keys.items():
            if value != "auto" and (table, key) != ("train", "momentum"):
                assert getattr(getattr(config, table), key) == value
    assert config.train.momentum == 0.5
    written = tmp_path / "config.toml"
    written.write_text(config.to_toml())
    assert load(written) == config
    assert '"auto"' not in written.read_text().split("[train]")[1].split("#")[0]


@pytest.mark.parametrize("bits", [1, 2, 8, 32])
@pytest.mark.parametrize("bytes_up", [100, 256, 856])
@pytest.mark.parametrize("passes", [6, 51])
@pytest.mark.parametrize("difference", ["forward", "central"])
def test_auto_keeps_to_the_bytes_and_the_passes(bits: int, bytes_up: int, passes: int, difference: str) -> None:
    budget = [f"train.bits={bits}", f"train.bytes_up={bytes_up}", f"train.passes={passes}"]
    t = load(None, [*budget, "train.spread=auto", f"train.difference={difference}"]).train
    losses = bytes(4 + (code_bytes(t.k, bits) + 4 if bits < 32 else 4 * t.k))
    usual = Reply(bytes(4), 3000, 99, 1200, losses, b"", 5000, 24_000, 700, 28_000)
    most = Reply(bytes(4), 65535, 65535, 65535, losses, b"", 10**9, 65535, 65535, 10**9)
    assert bytes_up - (13 if bits == 32 else 6) <= len(encode(usual)) <= len(encode(most)) <= bytes_up
    images = 8 * t.spread
    each = forward_passes(images, t.k, t.spread, difference == "central") / images
    assert each <= passes + 1e-9
    assert 1 <= t.spread <= t.k


def test_one_who_names_k_is_not_given_another() -> None:
    assert (load(None, ["preset=best", "train.k=100"]).train.k, load(None, ["preset=best"]).train.k) == (100, 1528)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preset=bets"], 'preset = "bets", expected one of'),
        (["train.spread=auto", "train.k=7"], "leave the other out"),
        (["train.spread=auto", "train.bytes_up=48"], "no room for a difference, expected at least 49"),
        (["train.spread=auto", "train.passes=1"], "train.passes = 1, expected an integer at least 2"),
        (["train.spread=auto", "train.bits=3"], "train.bits = 3, expected one of 1, 2, 4, 8, 32"),
        (["train.spread=other"], "train.spread"),
        (["train.memory=true", "train.seeds=shared"], "train.memory = true, expected false with train.seeds"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_in_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert message in str(caught.value)

"""Masks: exact counts, layers that never die, and files that are whole or refused."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed.draws import Draws
from foreseed.engine.errors import ForeseedError
from foreseed.prune import (
    Mask,
    MaskError,
    PruneError,
    apply_mask,
    check_mask,
    dense_mask,
    densities,
    keep_top,
    load_mask,
    prunable,
    rescale,
    save_mask,
)
from foreseed.prune.masks import _digest


def draws(seed: int = 0) -> Draws:
    return Draws(seed, "ties")


def count(mask: Mask) -> int:
    return sum(int(live.sum()) for live in mask.values())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 3)
    )


@st.composite
def selections(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Mask, int, int]:
    """Scores full of ties, a mask with at least one live weight a layer, a count that can be kept, and a seed."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    scores, mask = {}, {}
    for i, size in enumerate(sizes):
        scores[str(i)] = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))).float()
        live = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
        live[draw(st.integers(0, size - 1))] = True
        mask[str(i)] = live
    return scores, mask, draw(st.integers(len(sizes), count(mask))), draw(st.integers(0, 2**32))


@settings(max_examples=100, deadline=None)
@given(selections())
def test_exactly_as_many_weights_stay_as_asked_and_no_layer_dies(case) -> None:
    scores, mask, keep, seed = case
    kept = keep_top(scores, mask, keep, draws(seed))
    assert count(kept) == keep
    for name in mask:
        assert kept[name].any(), "a layer became empty"
        assert not (kept[name] & ~mask[name]).any(), "a pruned weight returned"
        best = scores[name][mask[name]].max()
        assert scores[name][kept[name]].max() == best, "a layer lost its best weight"


@settings(max_examples=100, deadline=None)
@given(selections())
def test_no_pruned_weight_scores_above_a_kept_one_unless_it_saved_a_layer(case) -> None:
    scores, mask, keep, seed = case
    kept = keep_top(scores, mask, keep, draws(seed))
    lost = [scores[name][mask[name] & ~kept[name]] for name in mask]
    # A layer's only survivor may owe its place to the rule against empty layers; every other place goes by score.
    earned = [scores[name][kept[name]].sort().values for name in mask]
    earned = [scored if len(scored) > 1 else scored[:0] for scored in earned]
    if (worst := torch.cat(earned)).numel() and (best := torch.cat(lost)).numel():
        assert worst.min() >= best.max()


def test_the_highest_scores_win_when_nothing_ties() -> None:
    scores = {"a": torch.tensor([[0.1, 5.0], [3.0, 0.2]]), "b": torch.tensor([4.0, 0.3, 0.05])}
    mask = {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
    kept = keep_top(scores, mask, 4, draws())
    assert kept["a"].tolist() == [[False, True], [True, False]]
    assert kept["b"].tolist() == [True, True, False]


def test_ties_are_broken_evenly_over_layers() -> None:
    scores = {"first": torch.zeros(3000), "last": torch.zeros(1000)}
    mask = {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
    shares = densities(keep_top(scores, mask, 1000, draws()))
    assert shares["first"] == pytest.approx(0.25, abs=0.04)
    assert shares["last"] == pytest.approx(0.25, abs=0.04)


def test_scores_that_differ_by_rounding_alone_are_equal_and_those_that_differ_by_more_are_not() -> None:
    mask = {"w": torch.ones(1000, dtype=torch.bool)}
    equal = torch.full((1000,), 1 / 3, dtype=torch.float64)
    jitter = equal * (1 + 1e-14 * torch.linspace(-1, 1, 1000, dtype=torch.float64))
    assert torch.equal(
        keep_top({"w": equal}, mask, 300, draws())["w"], keep_top({"w": jitter}, mask, 300, draws())["w"]
    )
    apart = equal * (1 + 1e-3 * torch.linspace(-1, 1, 1000, dtype=torch.float64))
    assert keep_top({"w": apart}, mask, 300, draws())["w"].nonzero().squeeze(1).tolist() == list(range(700, 1000))
    tiny = keep_top({"w": 1e-200 * apart}, mask, 300, draws())["w"]
    assert torch.equal(tiny, keep_top({"w": apart}, mask, 300, draws())["w"]), "small scores must not drown"


def test_a_seed_gives_the_same_mask_on_any_number_of_threads() -> None:
    scores = {"w": torch.randint(0, 5, (200_000,), generator=torch.Generator().manual_seed(1)).float()}
    mask = {"w": torch.ones(200_000, dtype=torch.bool)}
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            results.append(keep_top(scores, mask, 70_000, draws(7))["w"])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], keep_top(scores, mask, 70_000, draws(8))["w"])


@pytest.mark.parametrize("keep", [-1, 1, 7])
def test_a_count_that_cannot_be_kept_is_refused(keep: int) -> None:
    mask = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(3, dtype=torch.bool)}
    with pytest.raises(PruneError, match="expected a number from 2 to 6"):
        keep_top({"a": torch.zeros(3), "b": torch.zeros(3)}, mask, keep, draws())


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(PruneError, match="not finite"):
        keep_top({"a": torch.tensor([1.0, torch.nan])}, {"a": torch.ones(2, dtype=torch.bool)}, 1, draws())


def test_only_conv_and_linear_weights_are_prunable() -> None:
    assert list(prunable(net())) == ["0.weight", "4.weight", "5.weight"]
    assert list(prunable(nn.Linear(2, 2))) == ["weight"]


def test_apply_mask_zeroes_the_pruned_and_leaves_the_model_alone() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mask = keep_top({n: layer.weight.abs() for n, layer in prunable(model).items()}, dense_mask(model), 60, draws())
    pruned = apply_mask(model, mask).state_dict()
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(pruned[name], value * mask[name] if name in mask else value)


def test_rescale_keeps_the_variance_of_what_a_layer_passes_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2000, 500)
    mask = keep_top({"weight": torch.zeros(500, 2000)}, dense_mask(model), 100_000, draws())
    images = torch.randn(50, 2000)
    scaled, plain = rescale(model, mask), apply_mask(model, mask)
    assert torch.allclose(scaled.weight, model.weight * mask["weight"] * 10**0.5)
    assert torch.equal(scaled.bias, model.bias)
    with torch.no_grad():
        variance = model(images).var().item()
        assert scaled(images).var().item() / variance == pytest.approx(1.0, abs=0.05)
        assert plain(images).var().item() / variance == pytest.approx(0.1, abs=0.02)


def test_a_mask_that_does_not_fit_the_model_is_refused_by_name() -> None:
    model, good = net(), dense_mask(net())
    check_mask(model, good)
    missing = {name: live for name, live in good.items() if name != "4.weight"}
    with pytest.raises(MaskError, match=r"model has a weight '4\.weight' that the mask lacks"):
        apply_mask(model, missing)
    with pytest.raises(MaskError, match=r"mask has a weight '9\.weight' that the model lacks"):
        rescale(model, {**good, "9.weight": torch.ones(2, dtype=torch.bool)})
    with pytest.raises(MaskError, match=r"5\.weight: torch\.bool of shape \(3, 4\), expected .* \(3, 5\)"):
        apply_mask(model, {**good, "5.weight": torch.ones(3, 4, dtype=torch.bool)})
    with pytest.raises(MaskError, match=r"torch\.float32"):
        apply_mask(model, {**good, "5.weight": torch.ones(3, 5)})
    with pytest.raises(MaskError, match="no weight lives"):
        rescale(model, {**good, "5.weight": torch.zeros(3, 5, dtype=torch.bool)})
    assert issubclass(MaskError, ForeseedError)


def a_mask() -> Mask:
    return {
        "conv.weight": torch.rand(4, 2, 3, 3, generator=torch.Generator().manual_seed(1)) < 0.3,
        "shortcut.0.weight": torch.rand(5, 7, generator=torch.Generator().manual_seed(2)) < 0.3,
    }


def test_a_saved_mask_comes_back_the_same(tmp_path) -> None:
    path = tmp_path / "mask.npz"
    save_mask(path, a_mask())
    loaded = load_mask(path)
    assert list(loaded) == list(a_mask())
    for name, live in a_mask().items():
        assert loaded[name].dtype == torch.bool
        assert torch.equal(loaded[name], live)


def test_equal_masks_make_equal_files(tmp_path) -> None:
    save_mask(tmp_path / "a.npz", a_mask())
    save_mask(tmp_path / "b.npz", a_mask())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_mask_file_needs_no_more_than_a_bit_a_weight(tmp_path) -> None:
    save_mask(tmp_path / "mask.npz", {"w": torch.rand(1000, 800, generator=torch.Generator().manual_seed(0)) < 0.5})
    assert (tmp_path / "mask.npz").stat().st_size < 800_000 / 8 * 1.02


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch) -> None:
    path = tmp_path / "mask.npz"
    save_mask(path, a_mask())
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_mask(path, {"other": torch.ones(3, dtype=torch.bool)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_every_cut_of_a_mask_file_is_refused(tmp_path) -> None:
    path = tmp_path / "mask.npz"
    save_mask(path, a_mask())
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(MaskError, match=r"mask\.npz"):
            load_mask(path)


def test_a_flipped_byte_never_loads_as_another_mask(tmp_path) -> None:
    path = tmp_path / "mask.npz"
    save_mask(path, a_mask())
    whole = path.read_bytes()
    refused = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            loaded = load_mask(path)
        except MaskError:
            refused += 1
        else:  # some zip fields, such as dates, carry nothing
            assert list(loaded) == list(a_mask())
            assert all(torch.equal(loaded[name], live) for name, live in a_mask().items())
    assert refused > len(whole) / 2


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"w/shape": np.array([3]), "w/bits": np.zeros(1, np.uint8)},
        {"w/shape": np.array([{}], dtype=object), "w/bits": np.zeros(1, np.uint8), "sha256": np.zeros(32, np.uint8)},
    ],
)
def test_an_archive_that_is_no_mask_is_refused(tmp_path, arrays) -> None:
    np.savez(tmp_path / "mask.npz", **arrays)
    with pytest.raises(MaskError, match="not a mask, or a damaged one"):
        load_mask(tmp_path / "mask.npz")


@pytest.mark.parametrize(
    "arrays",
    [
        {"w/shape": np.array([3])},
        {"w/shape": np.array([30]), "w/bits": np.zeros(3, np.uint8)},
        {"w/shape": np.array([-1]), "w/bits": np.zeros(0, np.uint8)},
        {"w/shape": np.array([3]), "w/bits": np.zeros(1, np.float32)},
        {"w/shape": np.array([3]), "v/bits": np.zeros(1, np.uint8)},
        {"w/shape": np.array(["x"]), "w/bits": np.zeros(1, np.uint8)},
        {"w/shape": np.array(3), "w/bits": np.zeros(1, np.uint8)},
    ],
)
def test_contents_that_contradict_themselves_are_refused_even_under_a_right_hash(tmp_path, arrays) -> None:
    np.savez(tmp_path / "mask.npz", sha256=_digest(arrays), **arrays)
    with pytest.raises(MaskError, match="not a mask, or a damaged one"):
        load_mask(tmp_path / "mask.npz")


def test_files_of_other_kinds_are_refused(tmp_path) -> None:
    with pytest.raises(MaskError, match="No such file"):
        load_mask(tmp_path / "nothing.npz")
    with pytest.raises(MaskError, match="cannot be read"):
        load_mask(tmp_path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(MaskError, match="not a mask"):
        load_mask(tmp_path / "array.npy")

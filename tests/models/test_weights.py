"""Weights from files: what fits is taken to the bit, what does not is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foreseed.models import WeightsError, build, load_weights

State = dict[str, Tensor]


def net(seed: int, classes: int = 10) -> nn.Module:
    return build("resnet20", (3, 32, 32), classes, norm="batch", seed=seed)


def write_npz(state: State, path: Path) -> None:
    np.savez(path, **{name: tensor.numpy() for name, tensor in state.items()})


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    ".pt": torch.save,
    ".pth": torch.save,
    ".safetensors": save_file,
    ".npz": write_npz,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_bits(suffix: str, tmp_path: Path) -> None:
    source, target, file = net(1), net(2), tmp_path / f"weights{suffix}"
    source.norm.running_mean += 3  # type: ignore[operator,union-attr]
    WRITERS[suffix](source.state_dict(), file)
    load_weights(target, file)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name


def test_halves_and_doubles_become_float32(tmp_path: Path) -> None:
    source, target = net(1), net(2)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in source.state_dict().items()}
        torch.save(state, tmp_path / "weights.pt")
        load_weights(target, tmp_path / "weights.pt")
        assert target.conv.weight.dtype == torch.float32  # type: ignore[union-attr]
        assert torch.equal(target.conv.weight, source.conv.weight.to(dtype).float())  # type: ignore[union-attr,arg-type,operator]


def test_what_batch_norms_count_may_be_missing(tmp_path: Path) -> None:
    state = {name: t for name, t in net(1).state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "weights.pt")
    load_weights(net(2), tmp_path / "weights.pt")


def renamed(state: State) -> State:
    return {name.replace("fc.bias", "head.bias"): tensor for name, tensor in state.items()}


def with_nan(state: State) -> State:
    return state | {"fc.bias": torch.full((10,), torch.nan)}


def with_integers(state: State) -> State:
    return state | {"fc.bias": torch.arange(10)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, r"fc\.bias \(10,\) is missing; head\.bias \(10,\) is not of the model"),
        (lambda _: net(1, classes=100).state_dict(), r"fc\.weight is \(100, 64\), the model's \(10, 64\); fc\.bias is"),
        (lambda _: {"w": torch.ones(3)}, r"conv\.weight \(16, 3, 3, 3\) is missing; .*; and \d+ more; give weights"),
        (with_nan, r"fc\.bias holds numbers that are not finite"),
        (with_integers, r"fc\.bias holds torch\.int64, the model's torch\.float32"),
        (lambda state: {"epoch": 3, "state_dict": state}, "more than tensors by name"),
        (lambda _: net(1), "cannot be read as a state_dict"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_changes_nothing(
    change: Callable[[State], Any], said: str, tmp_path: Path
) -> None:
    model = net(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(change(net(1).state_dict()), tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match=said):
        load_weights(model, tmp_path / "weights.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("suffix", WRITERS)
def test_damage_is_one_sentence(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    WRITERS[suffix](net(1).state_dict(), file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(WeightsError, match=re.escape(f"{file}: cannot be read")):
        load_weights(net(2), file)


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file"):
        load_weights(net(1), tmp_path / "gone.pt")
    with pytest.raises(WeightsError, match=r"\.pt, \.pth, \.safetensors, \.npz"):
        load_weights(net(1), tmp_path / "weights.h5")

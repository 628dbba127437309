"""Weights from a file for a model to start from: a torch state_dict, a safetensors file, or an .npz of arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreseed.models.errors import WeightsError

_COUNTER = "num_batches_tracked"
"""What torch's batch norms count, and nothing here needs: a file may leave it out."""
_NAMED = 6
"""Differences that an error names; more would hide them."""


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Give a model the weights (and batch-norm statistics) of a file, all of them by their names in its state_dict.

    No code of the file is run. A file that does not fit is refused with the names and shapes that differ.
    """
    file = Path(path).expanduser()
    expected, given = model.state_dict(), _read(file)
    if wrong := list(_differences(expected, given)):
        named, more = "; ".join(wrong[:_NAMED]), f"; and {len(wrong) - _NAMED} more" if wrong[_NAMED:] else ""
        raise WeightsError(
            f"{file} does not fit the model: {named}{more}; give weights of the same model, input shape and classes"
        )
    model.load_state_dict(expected | given)


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix not in _READERS:
        raise WeightsError(f"model.weights {file}: expected a file of kind {', '.join(_READERS)}; convert it to one")
    if not file.is_file():
        raise WeightsError(f"model.weights {file}: there is no such file; check its path")
    read, kind = _READERS[file.suffix]
    try:
        found: Any = read(file)
    except ModuleNotFoundError:
        raise WeightsError(f"{file} needs the package safetensors; pip install 'foreseed[server]'") from None
    except Exception:  # damage, and pickles that are more than tensors, fail in a dozen ways that all mean the same
        raise WeightsError(f"{file}: cannot be read as {kind}; get it again, or save it anew") from None
    if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise WeightsError(f"{file}: holds more than tensors by name; expected {kind}")
    return {str(name): tensor for name, tensor in found.items()}


def _differences(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Iterator[str]:
    for name, own in expected.items():
        if name not in given:
            if not name.endswith(_COUNTER):
                yield f"{name} {tuple(own.shape)} is missing"
        elif given[name].shape != own.shape:
            yield f"{name} is {tuple(given[name].shape)}, the model's {tuple(own.shape)}"
        elif given[name].is_floating_point() != own.is_floating_point():
            yield f"{name} holds {given[name].dtype}, the model's {own.dtype}"
        elif not given[name].isfinite().all():
            yield f"{name} holds numbers that are not finite"
    for name in given:
        if name not in expected:
            yield f"{name} {tuple(given[name].shape)} is not of the model"


def _state_dict(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _safetensors(file: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(file)


def _npz(file: Path) -> Any:
    with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


_STATE_DICT = (_state_dict, "a state_dict, as torch.save(model.state_dict(), file) writes it")
_READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    ".pt": _STATE_DICT,
    ".pth": _STATE_DICT,
    ".safetensors": (_safetensors, "safetensors"),
    ".npz": (_npz, "an .npz file of plain arrays by name"),
}

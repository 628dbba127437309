"""Masks: which weights of a model live, how they are chosen, applied, and kept in a file."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from foreseed.draws import Draws
from foreseed.engine.files import write_whole
from foreseed.prune.errors import MaskError, PruneError

Mask: TypeAlias = dict[str, torch.Tensor]
"""Weight name -> bool tensor of the weight's shape, True where the weight lives."""

Scores: TypeAlias = dict[str, torch.Tensor]
"""Weight name -> one number a weight; the higher, the more it deserves to live."""


def prunable(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """The layers whose weights may be pruned, by weight name: every Conv2d and Linear, shortcuts and classifier too.

    Biases and norm parameters are never pruned.
    """
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }


def dense_mask(model: nn.Module) -> Mask:
    """The mask that prunes nothing."""
    return {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in prunable(model).items()}


def densities(mask: Mask) -> dict[str, float]:
    """The share of live weights of each layer."""
    return {name: int(live.sum()) / live.numel() for name, live in mask.items()}


def keep_top(scores: Scores, mask: Mask, keep: int, draws: Draws) -> Mask:
    """Keep exactly `keep` of the live weights: those with the highest scores, and never all of a layer's pruned.

    Scores are compared by their leading 24 bits: what differs beyond may be no more than another CPU's rounding (two
    weights in series, say, have equal scores, up to that). Equal ones are ranked by a random permutation from `draws`,
    so that no layer or corner of a layer is favoured. The best live weight of each layer is taken first and the other
    `keep - layers` places go by rank over all layers, so the count stays exact. What the mask has pruned stays pruned.
    """
    live = torch.cat([mask[name].flatten() for name in mask]).nonzero().squeeze(1)
    layers = sum(bool(layer.any()) for layer in mask.values())
    if not layers <= keep <= len(live):
        raise PruneError(
            f"cannot keep {keep} of {len(live)} live weights in {layers} layers: every layer keeps at least one, "
            f"so expected a number from {layers} to {len(live)}; change the density"
        )
    flat = _leading_bits(torch.cat([scores[name].flatten() for name in mask]))
    shuffled = live[torch.from_numpy(draws.permutation(len(live)))]
    if not flat[shuffled].isfinite().all():
        raise PruneError("scores of live weights are not finite; expected numbers, check the model's weights")
    ranked = shuffled[flat[shuffled].argsort(descending=True, stable=True)]
    sizes = [layer.numel() for layer in mask.values()]
    best = _first_of_each_layer(ranked, sizes)
    kept = torch.zeros(len(flat), dtype=torch.bool)
    kept[torch.cat([ranked[best], ranked[~best]])[:keep]] = True
    parts = torch.split(kept, sizes)
    return {name: part.reshape(mask[name].shape).clone() for name, part in zip(mask, parts, strict=True)}


def _leading_bits(scores: torch.Tensor) -> torch.Tensor:
    """Scores, rounded to 24 significant bits."""
    fraction, exponent = np.frexp(scores.detach().double().numpy())
    return torch.from_numpy(np.ldexp(np.rint(fraction * 2.0**24), exponent))


def _first_of_each_layer(ranked: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Marks, for each layer that occurs in `ranked` (flat weight numbers), its first weight."""
    layer = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[ranked]
    places = torch.arange(len(ranked))
    first = torch.full((len(sizes),), len(ranked)).scatter_reduce(0, layer, places, "amin")
    return first[layer] == places


def check_mask(model: nn.Module, mask: Mask) -> None:
    """Refuse a mask that does not fit the model, naming the first weight where they differ."""
    layers = prunable(model)
    for name in [*layers, *mask]:
        if name not in mask or name not in layers:
            where, other = ("model", "mask") if name in layers else ("mask", "model")
            raise MaskError(
                f"the {where} has a weight {name!r} that the {other} lacks; use the mask made for this model"
            )
        given, expected = tuple(mask[name].shape), tuple(layers[name].weight.shape)
        if given != expected or mask[name].dtype != torch.bool:
            raise MaskError(
                f"mask of {name}: {mask[name].dtype} of shape {given}, expected torch.bool of shape {expected}; "
                "use the mask made for this model"
            )
        if not mask[name].any():
            raise MaskError(f"mask of {name}: no weight lives, so nothing passes; expected at least one, prune again")


def apply_mask(model: nn.Module, mask: Mask) -> nn.Module:
    """A copy of the model with its pruned weights set to zero."""
    return _scaled(model, mask, dict.fromkeys(mask, 1.0))


def rescale(model: nn.Module, mask: Mask) -> nn.Module:
    """A copy of the model, pruned, with each layer's survivors multiplied by 1/sqrt(the layer's density).

    Pruning a share 1-d of a layer's weights shrinks the variance of what it passes on to d; this puts it back.
    """
    return _scaled(model, mask, {name: 1 / math.sqrt(density) for name, density in densities(mask).items() if density})


def _scaled(model: nn.Module, mask: Mask, scale: dict[str, float]) -> nn.Module:
    check_mask(model, mask)
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        for name, layer in prunable(pruned).items():
            layer.weight.mul_(scale[name]).masked_fill_(~mask[name], 0.0)
    return pruned


def save_mask(path: str | os.PathLike[str], mask: Mask) -> None:
    """Write a mask as NPZ: a weight's shape and packed bits, and a hash; the file is there whole or not at all."""
    arrays: dict[str, Any] = {}
    for name, live in mask.items():
        arrays[f"{name}/shape"] = np.array(live.shape, dtype="<i8")
        arrays[f"{name}/bits"] = np.packbits(live.numpy())
    content = io.BytesIO()
    np.savez_compressed(content, sha256=_digest(arrays), **arrays)
    write_whole(path, content.getbuffer())


def load_mask(path: str | os.PathLike[str]) -> Mask:
    """Read a mask that `save_mask` wrote."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise MaskError(f"{path}: cannot be read ({error.strerror}); expected a mask's file, check the path") from None
    try:
        return _unpack_all(np.load(io.BytesIO(content), allow_pickle=False))
    except Exception as error:  # damage makes zipfile, zlib and NumPy fail in a dozen ways, and all mean the same
        raise MaskError(f"{path}: not a mask, or a damaged one: {error}; get it again") from None


def _digest(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """SHA-256 over names and contents: a zip guards each member, but not the list of its members."""
    sha256 = hashlib.sha256()
    for name, content in arrays.items():
        sha256.update(f"{name}:{content.nbytes}:".encode() + content.tobytes())
    return np.frombuffer(sha256.digest(), dtype=np.uint8)


def _unpack_all(archive: Mapping[str, np.ndarray]) -> Mask:
    arrays = dict(archive)
    if not np.array_equal(arrays.pop("sha256"), _digest(arrays)):
        raise ValueError("its content does not have the hash that it carries")
    names = [key.removesuffix("/shape") for key in arrays if key.endswith("/shape")]
    return {name: _unpack(arrays[f"{name}/shape"], arrays[f"{name}/bits"]) for name in names}


def _unpack(shape: np.ndarray, bits: np.ndarray) -> torch.Tensor:
    size = tuple(int(n) for n in shape)
    total = math.prod(size)
    if bits.dtype != np.uint8 or bits.ndim != 1 or min(size, default=0) < 1 or len(bits) != (total + 7) // 8:
        raise ValueError(f"{bits.dtype} bits of shape {bits.shape} for a weight of shape {size}")
    return torch.from_numpy(np.unpackbits(bits, count=total).astype(bool).reshape(size))

"""A trained model, as a run left it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreseed.config import Config, ConfigError, load
from foreseed.engine import Engine, ForeseedError, Program, Samples
from foreseed.engine import load as load_model
from foreseed.engine.parts import KINDS
from foreseed.runs import RunFolderError, read_run

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Vector = npt.NDArray[np.float32]

_BATCH = 32


class ExportError(ForeseedError):
    """A model that cannot be exported so, or not to there."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A program with its trained values, and what its inputs and outputs mean."""

    name: str
    """Of its run's folder."""
    config: Config
    program: Program
    values: Vector
    """Live weights, biases and norm parameters, in the order of the program."""
    stats: Vector
    """Statistics of the batch norms; empty without any."""
    classes: tuple[str, ...]
    """Their names, by label."""

    @property
    def frozen(self) -> Vector | None:
        """The statistics as engines take them: None without any."""
        return self.stats if self.stats.size else None

    def check_images(self, images: Bytes) -> None:
        """Refuse what is no images of the model's shape."""
        if images.dtype != np.uint8 or images.shape[1:] != self.program.input_shape:
            raise ConfigError(
                f"{images.dtype} images {images.shape}: expected uint8 images [N, {self.program.input_shape}]; "
                "give images like those that the run was made for"
            )

    def logits(self, images: Bytes) -> Vector:
        """What the engine makes of images of bytes, a row of numbers each."""
        self.check_images(images)
        label_and_pixels = np.pad(images.reshape(len(images), -1), ((0, 0), (1, 0)))
        engine = Engine(self.program, batch=_BATCH)
        found = engine.logits(self.values, Samples.records(label_and_pixels, self.program.image_bytes), self.frozen)
        return np.array(found, np.float32).reshape(len(images), -1)

    def arrays(self) -> dict[str, Vector]:
        """Parameters and statistics by their names in the torch model, dense: pruned weights are 0."""
        live, arrays, at = dict(self.program.live()), {}, 0
        for place in self.program.places:
            for name, shape in place.parameters.items():
                array = np.zeros(shape, np.float32)
                sparse = name == "weight" and KINDS[place.op.kind].prunable
                indices = live[place.number] if sparse else range(array.size)
                array.flat[list(indices)] = self.values[at : at + len(indices)]
                arrays[f"{place.layer.name}.{name}"], at = array, at + len(indices)
        at = 0
        for place in self.program.places:
            for name, shape in place.statistics.items():
                arrays[f"{place.layer.name}.{name}"] = self.stats[at : at + shape[0]]
                at += shape[0]
        return arrays

    def model(self) -> torch.nn.Module:
        """The torch model with its trained weights, pruned ones 0."""
        from foreseed.models import build, restore

        model = build(
            self.config.model.name, self.program.input_shape, self.program.classes,
            seed=self.config.seed, **self.build_options(),
        )  # fmt: skip
        restore(model, self.program, self.values, self.frozen)
        return model.eval()

    def build_options(self) -> dict[str, Any]:
        """How `foreseed.models.build` was called, beside the model's name, shape, classes and seed."""
        m = self.config.model
        return {"activation": m.activation, "norm": m.norm, "init": m.init}

    def inputs(self, images: Bytes) -> torch.Tensor:
        """Images of bytes [N, channels, height, width] as the torch model was trained to see them, normalised."""
        import torch

        self.check_images(images)
        scale, shift = (torch.tensor(list(x)).view(-1, 1, 1) for x in (self.program.scale, self.program.shift))
        return torch.from_numpy(images.astype(np.float32)) * scale + shift


def read_trained(folder: str | Path, ema: bool = False) -> Trained:
    """The model of a finished run; with `ema` the moving average of its values, if it kept one."""
    run = read_run(folder)
    config, file = load(run.folder / "config.toml"), run.folder / ("model-ema.fsp" if ema else "model.fsp")
    if ema and not config.train.ema:
        raise ExportError(f"{run.folder}: that run kept no moving average; leave --ema out, or run with train.ema=0.9")
    if not file.exists():
        raise RunFolderError(f"{file}: this file of the run folder is missing; run it again")
    found = load_model(file)
    values, stats = np.array(found.values, np.float32), np.array(found.stats, np.float32)
    return Trained(run.folder.resolve().name, config, found.program, values, stats, found.classes)

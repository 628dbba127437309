"""The experiments that come with the package, by name: `demo`, `paper/cifar10-lenet5-k50` and so on."""

from __future__ import annotations

import os
from pathlib import Path

from foreseed.config.errors import ConfigError, did_you_mean

_FOLDER = Path(__file__).parents[1] / "experiments"


def shipped() -> dict[str, Path]:
    """Every experiment of the package, by its name."""
    files = sorted(_FOLDER.rglob("*.toml"))
    return {path.relative_to(_FOLDER).with_suffix("").as_posix(): path for path in files}


def find(given: str | os.PathLike[str]) -> Path:
    """The file that is meant: the one at this path, else the shipped experiment of this name."""
    path = Path(given)
    if path.suffix == ".toml" or path.is_file():
        return path
    experiments, name = shipped(), path.as_posix()
    if name not in experiments:
        raise ConfigError(
            f"{name}: neither a file nor an experiment that comes with foreseed, which are "
            f"{', '.join(experiments)}{did_you_mean(name, list(experiments))}"
        )
    return experiments[name]

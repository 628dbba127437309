"""The arms of a comparison: several experiments, each with several seeds."""

from __future__ import annotations

from collections.abc import Sequence

from foreseed.config.errors import ConfigError
from foreseed.config.schema import Config


def arms(configs: Sequence[Config], seeds: Sequence[int] = ()) -> list[Config]:
    """The runs of a comparison, each by a name of its own; with seeds, every config once with each of them."""
    names = [config.run_name for config in configs]
    if len(configs) < 2 and not seeds:
        raise ConfigError(f"{len(configs)} arms compare with nothing; give several experiments, or several seeds")
    if len(set(names)) < len(names):
        raise ConfigError(f"arms share a name ({', '.join(names)}); give each a `name` of its own")
    if not seeds:
        return list(configs)
    return [config.with_({"seed": seed, "name": f"{config.run_name}-s{seed}"}) for config in configs for seed in seeds]

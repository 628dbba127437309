"""What experiments start from is the same bits on this machine as on all others."""

import json

import pytest

from tests.engine.vectors import PATH
from tests.simulate.worlds import EXPERIMENTS, parts_of

WORLDS = {world.pop("experiment"): world for world in json.loads(PATH.read_text())["worlds"]}


def test_every_shipped_experiment_has_its_world_in_the_vectors() -> None:
    assert sorted(WORLDS) == EXPERIMENTS


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_world_of_an_experiment_is_made_here_as_everywhere(experiment: str) -> None:
    assert parts_of(experiment) == WORLDS[experiment]

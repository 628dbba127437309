"""Simulation: a coordinator and many devices in one process, running the code that deployments run."""

from foreseed.simulate.fleet import Fleet as Fleet
from foreseed.simulate.run import Progress as Progress
from foreseed.simulate.run import RunError as RunError
from foreseed.simulate.run import participants as participants
from foreseed.simulate.run import prune_watch as prune_watch
from foreseed.simulate.run import run as run
from foreseed.simulate.world import World as World
from foreseed.simulate.world import make_world as make_world

"""Sweeps: one experiment at many settings, each run once, wherever there is room for it."""

from foreseed.sweep.points import Point as Point
from foreseed.sweep.points import make_points as make_points
from foreseed.sweep.points import parse_axes as parse_axes
from foreseed.sweep.running import Outcome as Outcome
from foreseed.sweep.running import run_all as run_all
from foreseed.sweep.running import run_configs as run_configs

"""Simulation: a coordinator and many devices in one process, running the code that deployments run."""

from foreseed.simulate.devices import SimulatedDevices as SimulatedDevices
from foreseed.simulate.example import Example as Example
from foreseed.simulate.example import read_example as read_example
from foreseed.simulate.experiment import prepare as prepare
from foreseed.simulate.experiment import run_simulated as run_simulated
from foreseed.simulate.population import Population as Population

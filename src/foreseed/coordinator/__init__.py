"""The server without I/O: rounds, sampling, what devices missed, robust rules, the optimiser."""

from foreseed.coordinator.coordinator import Coordinator as Coordinator
from foreseed.coordinator.coordinator import Rules as Rules
from foreseed.coordinator.optimiser import Optimiser as Optimiser

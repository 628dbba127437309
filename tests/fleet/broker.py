"""A real mosquitto for tests: the one that `foreseed testbed` starts."""

from foreseed.fleet.local import Mosquitto as Mosquitto
from foreseed.fleet.local import free_ports as free_ports

"""A real mosquitto for tests: the one that `foreseed testbed` starts."""

from foreseed.serve.local import Mosquitto as Mosquitto
from foreseed.serve.local import free_ports as free_ports

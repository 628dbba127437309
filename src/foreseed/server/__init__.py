"""The server: a coordinator without I/O, the server's optimiser, and state that survives a kill."""

from foreseed.server.coordinator import Closed as Closed
from foreseed.server.coordinator import Coordinator as Coordinator
from foreseed.server.coordinator import NotFiniteError as NotFiniteError
from foreseed.server.coordinator import Rules as Rules
from foreseed.server.optimiser import Optimiser as Optimiser

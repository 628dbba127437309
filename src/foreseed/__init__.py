"""foreseed: federated learning for devices too small for backpropagation."""

import sys

__version__ = "0.1.0.dev0"

# Here, since all of foreseed passes by: vectors go to the wire and to files as they lie in memory, and the hashes of
# values are taken of that, so a big-endian machine would not fail but train on other numbers.
if sys.byteorder != "little":
    raise ImportError(
        f"foreseed: this machine is {sys.byteorder}-endian, messages and files are little-endian; "
        "use a little-endian machine (x86-64, ARM, RISC-V)"
    )

TYPE_CHECKING = False
if TYPE_CHECKING:
    from foreseed.api import Comparison, Config, ConfigError, ForeseedError, Result, compare, load, read, run

__all__ = ["Comparison", "Config", "ConfigError", "ForeseedError", "Result", "compare", "load", "read", "run"]


def __getattr__(name: str) -> object:
    # Loaded when they are asked for: a device imports this package too, and saves all that they import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from foreseed import api
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"foreseed.{name} is of the server side, and {missing.name} is not installed here; "
            "pip install 'foreseed[server]'"
        ) from missing
    return getattr(api, name)

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

"""Builds the C engine into `foreseed.engine._native` with cffi, in API mode (called by setup.py)."""

import os
import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(HERE)) for path in [*HERE.glob("*.c"), *HERE.glob("host/*.c")])
HEADERS = ("foreseed.h", "host/guard.h", "host/clock.h")

# Contraction off: only where the code says fma is one used, so that all machines give the same bits.
FLAGS = [
    "-std=c99",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-DFS_TIMED",
]


def declarations() -> str:
    """The public headers without their preprocessor lines: one text for C and for Python."""
    text = "".join((HERE / name).read_text() for name in HEADERS)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


ffi = FFI()
ffi.cdef(declarations())
ffi.set_source(
    "foreseed.engine._native",
    "".join(f'#include "{name}"\n' for name in HEADERS),
    sources=[os.path.relpath(HERE / name) for name in SOURCES],
    include_dirs=[os.path.relpath(HERE)],
    depends=[os.path.relpath(path) for path in [*HERE.glob("*.[hi]*"), *HERE.glob("host/*.h")]],
    extra_compile_args=FLAGS,
    # Without a compiler the package still installs, and the NumPy reference serves.
    optional=True,
)

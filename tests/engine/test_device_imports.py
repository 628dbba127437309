"""What a device imports is counted: a fresh process must stay without NumPy, PyTorch and the rest of a server."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"numpy", "torch", "dataclasses", "typing", "enum", "json", "hashlib", "pathlib", "inspect"}


def test_a_device_imports_next_to_nothing():
    # Without site, whose start-up code may import anything.
    code = (
        f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "import foreseed.device, foreseed.engine\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())

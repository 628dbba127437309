"""Run a command as on a machine whose processor has AVX2 and no more, whatever this one has.

.venv/bin/python tools/avx2_machine.py .venv/bin/foreseed bench engine --threads 1

Every library in the command's process is held, those without a switch of their own (ONNX Runtime) too.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_suffix(".c")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit("error: only Linux on x86-64 can answer for the processor")
    with TemporaryDirectory() as folder:
        shim = Path(folder, "shim.so")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(shim)], check=True)
        try:
            done = subprocess.run(sys.argv[1:], env=os.environ | {"LD_PRELOAD": str(shim)}, check=False)
        except OSError as error:
            sys.exit(f"error: {sys.argv[1]}: {error.strerror}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()

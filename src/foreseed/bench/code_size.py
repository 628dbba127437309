"""How many bytes of code the engine takes on a microcontroller."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from foreseed.trained.c_folder import engine_sources

_FLAGS = (
    "-Os", "-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16", "-ffp-contract=off", "-std=c99",
)  # fmt: skip


def cortex_m_code_bytes() -> int | None:
    """Bytes of code of the engine for a Cortex-M4; None without its compiler."""
    compiler, size = shutil.which("arm-none-eabi-gcc"), shutil.which("arm-none-eabi-size")
    if compiler is None or size is None:
        return None
    with TemporaryDirectory() as folder:
        objects = []
        for source in engine_sources():
            if source.suffix != ".c" or source.name.startswith("isa_avx"):  # these are empty on this processor
                continue
            objects.append(str(Path(folder, source.stem + ".o")))
            subprocess.run([compiler, *_FLAGS, "-c", str(source), "-o", objects[-1]], check=True, capture_output=True)
        table = subprocess.run([size, *objects], check=True, capture_output=True, text=True).stdout
    return sum(int(line.split()[0]) for line in table.splitlines()[1:])

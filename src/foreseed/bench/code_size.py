"""How many bytes of code the engine takes on a microcontroller, and what a build saves that leaves layers out."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from foreseed.engine.errors import ForeseedError
from foreseed.trained.c_folder import engine_sources

_FLAGS = (
    "-Os", "-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16", "-ffp-contract=off", "-std=c99",
)  # fmt: skip


def cortex_m_code_bytes(without: Iterable[str] = ()) -> int | None:
    """Bytes of code of the engine for a Cortex-M4; None without its compiler.

    `without` names layers to leave out, as in `FS_LAYER_...` of foreseed.h but in lower case.
    """
    compiler, size = shutil.which("arm-none-eabi-gcc"), shutil.which("arm-none-eabi-size")
    if compiler is None or size is None:
        return None
    left_out = "|".join(f"FS_LAYER_{name.upper()}" for name in without) or "0"
    with TemporaryDirectory() as folder:
        objects = []
        for source in engine_sources():
            if source.suffix != ".c" or source.name.startswith(
                ("isa_avx", "isa_neon")
            ):  # these are empty on this processor
                continue
            objects.append(str(Path(folder, source.stem + ".o")))
            command = [compiler, *_FLAGS, f"-DFS_WITHOUT={left_out}", "-c", str(source), "-o", objects[-1]]
            subprocess.run(command, check=True, capture_output=True)
        table = subprocess.run([size, *objects], check=True, capture_output=True, text=True).stdout
    return sum(int(line.split()[0]) for line in table.splitlines()[1:])


def layer_names() -> list[str]:
    """The layers that a build may leave out."""
    (header,) = (source for source in engine_sources() if source.name == "foreseed.h")
    return [name.lower() for name in re.findall(r"FS_LAYER_(\w+) =", header.read_text())]


GROUPS = {
    "all smooth activations": ("sigmoid", "silu", "tanh", "gelu", "gelu_tanh"),
    "all norms": ("batch_norm", "group_norm"),
    "all pools": ("pool", "ceil_mode", "adaptive_pool"),
    "all that LeNet-5 and ResNet-20 do without": (
        "relu6", "leaky_relu", "hardsigmoid", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "mul", "cat", "pad",
        "ceil_mode", "adaptive_pool", "shared",
    ),
}  # fmt: skip
"""Layers that share most of their code, where what one of them takes alone is little; and the paper's nets."""


def bench_code(progress: Callable[[str], None] = lambda _: None) -> dict[str, object]:
    """Bytes of the whole engine, of one without any layer that may be left out, and what leaving out each saves."""
    whole = cortex_m_code_bytes()
    if whole is None:
        raise ForeseedError("no arm-none-eabi-gcc on PATH: install the Debian package gcc-arm-none-eabi")
    layers = layer_names()
    saved = {}
    for name, left_out in ({layer: (layer,) for layer in layers} | GROUPS).items():
        progress(name)
        saved[name] = whole - (cortex_m_code_bytes(left_out) or 0)
    return {"whole": whole, "least": cortex_m_code_bytes(layers), "saved": saved}

"""What this machine is and has, for people who compare numbers or look for what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from foreseed import __version__

_PACKAGES = ("numpy", "torch", "onnxruntime", "cffi", "cbor2", "paho-mqtt", "pydantic", "matplotlib", "scikit-learn")
_COMPILERS = ("cc", "gcc", "clang", "arm-none-eabi-gcc")


def describe_machine() -> dict[str, str | int | None]:
    """The facts that a benchmark's numbers depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "instruction_set": instruction_set(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "foreseed": __version__,
        **{name: package_version(name) for name in ("numpy", "torch", "onnxruntime")},
        "date": date.today().isoformat(),
    }


def instruction_set() -> str | None:
    """What the C engine uses here (avx512, avx2, neon or plain), or None where it was not built."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it was not built is what we are to find out
            from foreseed.engine.native import isa
    except ImportError:
        return None
    return isa()


def packages() -> dict[str, str | None]:
    """The version of every package that some part of foreseed uses; None where it is not installed."""
    return {name: package_version(name) for name in _PACKAGES}


def package_version(name: str) -> str | None:
    """The installed version of a package, found without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def compilers() -> dict[str, str | None]:
    """Where the compilers are that build the engine, for this machine and for a microcontroller."""
    return {name: shutil.which(name) for name in _COMPILERS}


def memory_bytes() -> dict[str, int | None]:
    """All memory and what is free of it, where the system says so."""
    facts = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            facts[name] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return {"total": facts.get("MemTotal"), "available": facts.get("MemAvailable")}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())

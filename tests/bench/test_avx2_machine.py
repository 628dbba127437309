"""`tools/avx2_machine.py`: a machine with more than AVX2 stands in for one without."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools/avx2_machine.py"
TELL = "from foreseed.engine.native import isas; print(*isas())"


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(TOOL), *command], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_program_sees_avx2_and_no_more_or_is_told_that_this_machine_cannot() -> None:
    done = run(sys.executable, "-c", TELL)
    if done.returncode:
        assert " cpuid_fault" not in Path("/proc/cpuinfo").read_text()
        assert done.stderr.startswith("error: ")
    else:
        free = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [isa for isa in free.stdout.split() if isa != "avx512"]


def test_what_a_program_starts_is_free() -> None:
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TELL!r}], check=True)"
    done = run(sys.executable, "-c", start)
    if done.returncode:
        assert " cpuid_fault" not in Path("/proc/cpuinfo").read_text()
    else:
        free = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
        assert done.stdout == free.stdout


def test_a_command_that_is_not_there_is_one_sentence() -> None:
    done = run("no-such-command")
    assert (done.returncode, done.stderr) == (1, "error: no-such-command: No such file or directory\n")

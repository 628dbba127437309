"""`tools/avx2_machine.py`: a machine with more than AVX2 stands in for one without."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import avx2_machine

ASK = """
#include <cpuid.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    unsigned a, b, c, d;
    if (argc != 3) return 1;
    __cpuid_count(atoi(argv[1]), atoi(argv[2]), a, b, c, d);
    printf("%u %u %u %u", a, b, c, d);
    return 0;
}
"""
# What leaf 7 says of AVX-512 (F DQ IFMA CD BW VL), and of what every machine with AVX2 has: FSGSBASE, AVX2 itself.
AVX512, KEPT = 1 << 16 | 1 << 17 | 1 << 21 | 1 << 28 | 1 << 30 | 1 << 31, 1 << 0 | 1 << 5


def run(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | environment
    )


def asked(program: Path, leaf: Sequence[int], **environment: str) -> list[int]:
    done = run(str(program), *map(str, leaf), **environment)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_what_a_held_program_is_told_of_the_processor(tmp_path: Path) -> None:
    free, held = tmp_path / "free", tmp_path / "held"
    (tmp_path / "ask.c").write_text(ASK)
    for program in (free, held):
        # Not relocatable: addresses are then far from where things lie in the file.
        subprocess.run(["gcc", "-no-pie", str(tmp_path / "ask.c"), "-o", str(program)], check=True)
    assert avx2_machine.hold(held) == len(avx2_machine.find_cpuid(free)) == 1
    assert not avx2_machine.find_cpuid(held)
    shim = {"LD_PRELOAD": str(avx2_machine.build_shim(tmp_path))}
    before, after = asked(free, (7, 0)), asked(held, (7, 0), **shim)
    assert not after[1] & AVX512
    assert after[1] & KEPT == before[1] & KEPT
    assert after[1] | AVX512 == before[1] | AVX512
    # Other questions are answered as ever, and programs that are not held are left alone.
    assert asked(held, (0, 0), **shim) == asked(free, (0, 0))
    assert asked(free, (7, 0), **shim) == before


def test_a_fault_of_its_own_still_ends_a_held_program(tmp_path: Path) -> None:
    (tmp_path / "fault.c").write_text("int main(void) { __builtin_trap(); }")
    subprocess.run(["gcc", str(tmp_path / "fault.c"), "-o", str(tmp_path / "fault")], check=True)
    done = run(str(tmp_path / "fault"), LD_PRELOAD=str(avx2_machine.build_shim(tmp_path)))
    assert done.returncode == -signal.SIGILL


def test_onnxruntime_is_a_held_copy_and_all_others_are_switched() -> None:
    tell = (
        "import pathlib, avx2_machine, onnxruntime, torch; from foreseed.engine.native import isa;"
        "print(sum(len(avx2_machine.find_cpuid(library))"
        " for library in pathlib.Path(onnxruntime.__file__).parent.rglob('*.so*')),"
        " isa(), torch.backends.cpu.get_cpu_capability())"
    )
    asked = {"PYTHONPATH": str(Path(avx2_machine.__file__).parent)}
    free = run(sys.executable, "-c", tell, **asked)
    assert int(free.stdout.split()[0]) > 0, free.stderr
    held = run(sys.executable, avx2_machine.__file__, sys.executable, "-c", tell, **asked)
    assert held.stdout.split() == ["0", "avx2", "AVX2"], held.stderr


def test_a_command_that_is_not_there_is_one_sentence() -> None:
    done = run(sys.executable, avx2_machine.__file__, "no-such-command")
    assert (done.returncode, done.stderr) == (1, "error: no-such-command: No such file or directory\n")

"""The protocol is little-endian: a machine that is not must be told so before it says anything wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["foreseed", "foreseed.wire", "foreseed.device.agent", "foreseed.cli"])
def test_a_big_endian_machine_is_refused_at_import_in_one_sentence(module: str) -> None:
    script = f"import sys; sys.byteorder = 'big'; import {module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ImportError: foreseed: this machine is big-endian")
    assert "use a little-endian machine" in said

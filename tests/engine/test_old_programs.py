"""A program that an earlier foreseed wrote is read by this one, and gives the bits that `docs/format.md` demands."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from foreseed.engine.errors import ProgramError
from foreseed.engine.native import NativeEngine, isas
from foreseed.engine.ops import Act, Kind, Op
from foreseed.engine.program import Program, assemble, load
from foreseed.engine.reference import ReferenceEngine
from foreseed.engine.reference_check import check_program
from tests.engine.conftest import Backend
from tests.engine.programs import records

OLD = Path(__file__).parent / "old/version1.fsp"
SAMPLES = records(
    (np.arange(6 * 2 * 12 * 12) * 37 % 251).astype(np.uint8).reshape(6, 2, 12, 12), (np.arange(6) % 5).astype(np.uint8)
)
# Loss with frozen statistics, and with those of batches of four: by machines with a fused multiply-add, and without.
FUSED = ("0x1.d9dac4c15c09bp+3", "0x1.7e3a9c1dc2352p+3")
UNFUSED = ("0x1.d9dac4f43e668p+3", "0x1.7e3a9c188e34ep+3")


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_losses_are_the_bits_that_the_format_demands(isa: str, lanes: int) -> None:
    model = load(OLD)
    engine = NativeEngine(model.program, batch=4, lanes=lanes, isa=isa)
    losses = [engine.loss(model.values, SAMPLES, stats)[0] for stats in (model.stats, None)]
    assert tuple(loss.hex() for loss in losses) == (UNFUSED if isa == "plain" else FUSED)


def test_losses_of_the_reference_agree_to_rounding() -> None:
    model = load(OLD)
    engine = ReferenceEngine(model.program, batch=4)
    losses = [engine.loss(model.values, SAMPLES, stats)[0] for stats in (model.stats, None)]
    np.testing.assert_allclose(losses, [float.fromhex(loss) for loss in FUSED], rtol=1e-6)


def test_a_program_is_written_in_the_oldest_version_that_has_its_ops(tmp_path: Path) -> None:
    model = load(OLD)
    assert model.program.version == 1
    live: list[list[int] | None] = [None] * len(model.program.ops)
    for number, indices in model.program.live():
        live[number] = list(indices)
    p = model.program
    again = assemble(p.input_shape, p.classes, p.scale, p.shift, p.ops, live, [layer.name for layer in p.layers()])
    assert again.bytes == p.bytes
    again.save(tmp_path / "again.fsp", model.values, model.stats)
    assert (tmp_path / "again.fsp").read_bytes() == OLD.read_bytes()


def test_version_1_has_no_ops_of_version_2(backend: Backend) -> None:
    conv = {"channels": 3, "groups": 1, "window": (1, 1, 1, 1, 0, 0)}
    for act, version in ((Act.HARDSWISH, 1), (Act.SILU, 2)):
        program = assemble((2, 1, 1), 3, [1.0] * 2, [0.0] * 2, [Op(Kind.CONV, 0, act=act, **conv)], [None])
        assert program.version == version
        check_program(program)
        backend.engine(program)
    claimed = program.bytes[:4] + struct.pack("<H", 1) + program.bytes[6:]
    with pytest.raises(ProgramError, match="op 0"):
        backend.engine(Program(claimed))

"""Programs and their file: what is written comes back, and nothing damaged gets through."""

from __future__ import annotations

import hashlib
import struct
from array import array
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.engine.errors import ProgramError, ValuesError
from foreseed.engine.program import FILE_MAGIC, Kind, Op, Program, assemble, load
from tests.engine.programs import Case, lenet5, programs

VERSION_AT, PROGRAM_AT = 8, 28


def linear(n: int, live: list[int] | None) -> Program:
    """One linear layer of n weights."""
    op = Op(Kind.CONV, 0, channels=1, groups=1, window=(1, n, 1, 1, 0, 0))
    return assemble((1, 1, n), 1, [1.0], [0.0], [op], [live])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model file: 5 live weights and batch-norm statistics."""
    ops = [
        Op(Kind.CONV, 0, channels=2, groups=1, window=(2, 2, 1, 1, 0, 0)),
        Op(Kind.NORM, 1, eps=0.5),
    ]
    program = assemble((1, 2, 2), 2, [1.0], [0.0], ops, [[0, 2, 3, 5, 7], None], ["conv", "norm"])
    program.save(tmp_path / "model.fsp", array("f", range(5)), array("f", [0, 1, 2, 3]))
    return tmp_path / "model.fsp"


def rewrite(path: Path, at: int, new: bytes) -> None:
    """Change some bytes of a model file, and its hash with them."""
    data = bytearray(path.read_bytes()[:-32])
    data[at : at + len(new)] = new
    path.write_bytes(data + hashlib.sha256(data).digest())


@settings(max_examples=50, deadline=None)
@given(case=programs())
def test_a_saved_model_comes_back(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    path = tmp_path_factory.mktemp("saved") / "model.fsp"
    case.program.save(path, case.values, case.stats)
    model = load(path)
    assert model.program.bytes == case.program.bytes
    assert model.program.ops == case.program.ops
    assert (model.values.tobytes(), model.stats.tobytes()) == (case.values.tobytes(), case.stats.tobytes())


def test_layer_names_come_back(model: Path) -> None:
    assert [layer.name for layer in load(model).program.layers()] == ["conv", "norm"]


def test_the_program_hash_does_not_depend_on_the_values(model: Path) -> None:
    program = load(model).program
    program.save(model, array("f", [9] * 5), array("f", [9] * 4))
    assert load(model).program.bytes == program.bytes


def test_a_file_cut_anywhere_is_refused(model: Path) -> None:
    whole = model.read_bytes()
    for length in range(len(whole)):
        model.write_bytes(whole[:length])
        with pytest.raises(ProgramError, match="truncated"):
            load(model)


def test_a_program_cut_anywhere_is_refused() -> None:
    whole = linear(20, [3, 8, 19]).bytes
    for length in range(len(whole)):
        with pytest.raises(ProgramError):
            Program(whole[:length])


def test_a_file_with_something_after_its_end_is_refused(model: Path) -> None:
    model.write_bytes(model.read_bytes() + b"\0")
    with pytest.raises(ProgramError, match="padded"):
        load(model)


def test_any_changed_byte_is_noticed(model: Path) -> None:
    whole = model.read_bytes()
    for at in range(len(whole)):
        model.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(ProgramError):
            load(model)


def test_a_damaged_value_is_told_from_its_hash(model: Path) -> None:
    data = bytearray(model.read_bytes())
    data[-40] ^= 1
    model.write_bytes(data)
    with pytest.raises(ProgramError, match="does not have the hash"):
        load(model)


def test_another_kind_of_file_is_refused(model: Path) -> None:
    rewrite(model, 0, b"\x89PNG")
    with pytest.raises(ProgramError, match="not a foreseed model"):
        load(model)


def test_a_file_from_a_text_mode_transfer_is_refused(model: Path) -> None:
    model.write_bytes(model.read_bytes().replace(b"\r\n", b"\n"))
    with pytest.raises(ProgramError, match="not a foreseed model"):
        load(model)


def test_versions_from_the_future_are_refused(model: Path) -> None:
    good = model.read_bytes()
    rewrite(model, VERSION_AT, struct.pack("<H", 2))
    with pytest.raises(ProgramError, match="version 2 is from the future"):
        load(model)
    model.write_bytes(good)
    rewrite(model, PROGRAM_AT + 4, struct.pack("<H", 3))
    with pytest.raises(ProgramError, match="version 3 is from the future"):
        load(model)


def test_a_count_that_contradicts_the_program_is_refused(model: Path) -> None:
    program_counts = PROGRAM_AT + 16
    rewrite(model, program_counts, struct.pack("<I", 6))
    with pytest.raises(ProgramError, match="5 values and 4 statistics for a program of 6 and 4"):
        load(model)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize(("section", "place"), [("values", 0), ("values", 4), ("statistics", 0), ("statistics", 3)])
def test_a_file_with_numbers_that_are_not_finite_is_refused(model: Path, bad: float, section: str, place: int) -> None:
    values_at = PROGRAM_AT + len(load(model).program.bytes)
    at = values_at + 4 * place + (20 if section == "statistics" else 0)
    rewrite(model, at, struct.pack("<f", bad))
    with pytest.raises(ValuesError, match=f"{section}: number {place} is"):
        load(model)


@pytest.mark.parametrize(
    ("values", "stats", "said"),
    [
        (array("f", [0] * 4), array("f", [0] * 4), "values: 16 bytes given, expected 20"),
        (array("f", [0] * 6), array("f", [0] * 4), "values: 24 bytes given, expected 20"),
        (bytes(19), array("f", [0] * 4), "values: 19 bytes given, expected 20"),
        (array("f", [0] * 5), b"", "statistics: 0 bytes given, expected 16"),
        (array("f", [0, 0, nan, 0, 0]), array("f", [0] * 4), "values: number 2 is nan"),
        (array("f", [0] * 5), array("f", [0, inf, 0, 0]), "statistics: number 1 is inf"),
    ],
)
def test_unfit_values_are_refused_and_nothing_is_written(model: Path, values, stats, said: str) -> None:
    program, before = load(model).program, model.read_bytes()
    for target in (model, model.with_name("other.fsp")):
        with pytest.raises(ValuesError, match=said):
            program.save(target, values, stats)
    assert model.read_bytes() == before
    assert list(model.parent.iterdir()) == [model]


def test_a_failed_write_leaves_nothing_behind(model: Path) -> None:
    target = model.with_name("taken.fsp")
    target.mkdir()
    with pytest.raises(OSError, match=r"taken\.fsp"):
        load(model).program.save(target, array("f", [0] * 5), array("f", [0] * 4))
    assert sorted(model.parent.iterdir()) == [model, target]


@given(n=st.integers(1, 3000), density=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_the_structure_of_any_mask_comes_back(n: int, density: float, seed: int) -> None:
    live = np.flatnonzero(np.random.default_rng(seed).random(n) < density).tolist()
    assert [list(indices) for _, indices in linear(n, live).live()] == [live]


@given(gaps=st.lists(st.integers(0, 2000), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_structure_of_any_gaps_comes_back(gaps: list[int]) -> None:
    live = (np.cumsum(np.array(gaps) + 1) - 1).tolist()
    assert [list(indices) for _, indices in linear(live[-1] + 2, live).live()] == [live]


def test_the_structure_has_the_bits_of_the_specification() -> None:
    as_mask = linear(8, [1, 4])  # gaps 1 and 2 with r = 0: 0 1, 0 0 1
    assert (as_mask.ops[0].rice, as_mask.bytes[-1:]) == (0, bytes([0b10010]))
    far = linear(200, [21, 40, 67])  # gaps 21, 18 and 26 with r = 4: 0 1 1010, 0 1 0100, 0 1 0101, lowest bits first
    assert far.ops[0].rice == 4
    code = 0b10 | 5 << 2 | (0b10 | 2 << 2) << 6 | (0b10 | 10 << 2) << 12
    assert far.bytes[-3:] == code.to_bytes(3, "little")


def test_a_sparse_layer_is_smaller_than_its_mask() -> None:
    rng = np.random.default_rng(1)
    live = np.flatnonzero(rng.random(10_000) < 0.07).tolist()
    entropy = -(0.07 * np.log2(0.07) + 0.93 * np.log2(0.93)) * 10_000 / 8
    structure = len(linear(10_000, live).bytes) - len(linear(10_000, []).bytes)
    assert structure < 1.05 * entropy


def test_a_dense_layer_needs_no_structure() -> None:
    assert linear(10, list(range(10))).bytes == linear(10, None).bytes


@pytest.mark.parametrize("live", [[3, 3], [4, 2], [-1]])
def test_live_weights_that_do_not_ascend_are_refused(live: list[int]) -> None:
    with pytest.raises(ProgramError, match="must ascend"):
        linear(10, live)


@pytest.mark.parametrize(("code", "said"), [(0b10000010, "live weight 7 of a layer with 6"), (0b10, "cut short")])
def test_a_structure_that_does_not_fit_its_layer_is_refused(code: int, said: str) -> None:
    good = linear(6, [1, 4])
    with pytest.raises(ProgramError, match=said):
        list(Program(good.bytes[:-1] + bytes([code])).live())


def test_the_layer_table_of_lenet5_is_the_one_counted_by_hand() -> None:
    program = lenet5()
    table = [(layer.name, layer.shape, layer.n_weights, layer.n_values, layer.macs) for layer in program.layers()]
    assert table == [
        ("conv1", (6, 14, 14), 450, 456, 352_800),  # 450 x 28 x 28
        ("conv2", (16, 5, 5), 2_400, 2_416, 240_000),  # 2,400 x 10 x 10
        ("fc1", (120, 1, 1), 48_000, 48_120, 48_000),
        ("fc2", (84, 1, 1), 10_080, 10_164, 10_080),
        ("fc3", (10, 1, 1), 840, 850, 840),
    ]
    assert (program.n_live, program.macs, program.dense_macs) == (62_006, 651_720, 651_720)
    assert program.bytes[:4] == b"FSPP"
    assert bytes.fromhex("894653500d0a1a0a") == FILE_MAGIC


def test_pruned_weights_cost_nothing() -> None:
    program = lenet5([list(range(0, 450, 10)), [], None, None, None])
    conv1, conv2 = program.layers()[:2]
    assert (conv1.n_weights, conv1.macs, conv1.dense_macs, conv1.density) == (45, 45 * 784, 352_800, 0.1)
    assert (conv2.n_weights, conv2.macs, conv2.n_values) == (0, 0, 16)
    assert program.n_live == 62_006 - 405 - 2_400

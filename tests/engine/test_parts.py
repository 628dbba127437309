"""The table of parts is all that readers of a program know: it is complete, and what it gains, all of them gain."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import fields
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foreseed import models
from foreseed.bench.onnx_graph import IMAGES, onnx_model
from foreseed.engine import reference_layers
from foreseed.engine.errors import ProgramError
from foreseed.engine.ops import Act, Kind, Op, Pool
from foreseed.engine.parts import ACTS, KINDS, POOLS, Part, Saved
from foreseed.engine.program import Program, assemble, load
from foreseed.engine.reference import ReferenceEngine
from foreseed.engine.reference_check import check_program
from foreseed.engine.types import Samples
from foreseed.meter import forward_flops, planned_bp_bytes
from foreseed.meter.backprop_device import logits
from foreseed.models.layers import MODULES, Net, View
from tests.meter.test_memory import saved_by_torch
from tests.models.agreement import random_mask, scramble, shard, torch_logits
from tests.models.nets import SMALL, conv, head
from tests.models.nets import Net as NetOf

TABLES: list[tuple[type[IntEnum], Any]] = [(Kind, KINDS), (Act, ACTS), (Pool, POOLS)]
PASSING = {Kind.POOL, Kind.ACT}  # what these do is in their pool and their activation


@pytest.mark.parametrize(("numbers", "table"), TABLES)
def test_every_number_of_the_format_has_a_complete_entry(numbers: type[IntEnum], table: dict[Any, Part]) -> None:
    assert list(table) == list(numbers)
    for number, part in table.items():
        if number.name == "NONE" or (number in PASSING and numbers is Kind):
            assert part.reference == ""
            continue
        assert callable(getattr(reference_layers, part.reference))
        assert part.torch is not Part.torch
        assert part.onnx is not Part.onnx


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_uses_fields_that_an_op_has(kind: Kind) -> None:
    assert KINDS[kind].fields
    assert KINDS[kind].fields <= {field.name for field in fields(Op)} - {"kind", "a"}


# --- a kind and an activation that the format does not have ---


class Scale(nn.Module):
    """A factor for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


SCALE = Part(
    reference="scale",
    torch=lambda f, op, x, own: x[0] * own[0],
    onnx=lambda graph, op, x, own: graph.add("Mul", [x[0], own[0]]),
    saved=lambda op, shape, made: Saved(input=True),
    fields=frozenset({"act"}),
    parameters=lambda op, shape: {"weight": (shape[0], 1, 1)},
    macs=lambda op, n_weights, made: prod(made),
)
SOFTPLUS = Part(
    reference="softplus",
    torch=lambda f, op, x, own: f.softplus(x[0]),
    onnx=lambda graph, op, x, own: graph.add("Softplus", x),
    saved=lambda op, shape, made: Saved(input=True),
)


def add_number(monkeypatch: pytest.MonkeyPatch, numbers: Any, name: str) -> Any:
    """A new member of an enumeration for the length of a test: what an edit of `ops.py` does for good."""
    member = int.__new__(numbers, max(numbers) + 1)
    member._name_, member._value_ = name, int(member)
    monkeypatch.setitem(numbers._value2member_map_, int(member), member)
    return member


def knowing(monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module], op: Callable[[int], Op]) -> None:
    """Let the compiler know a torch layer."""

    def handler(net: Net, module: nn.Module, x: View) -> View:
        return net.emit(op(x.tensor), x, module)

    monkeypatch.setitem(MODULES, layer, handler)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A net with both, once they are in the table, in the reference and in the compiler."""
    scale, softplus = add_number(monkeypatch, Kind, "SCALE"), add_number(monkeypatch, Act, "SOFTPLUS")
    monkeypatch.setitem(KINDS, scale, SCALE)
    monkeypatch.setitem(ACTS, softplus, SOFTPLUS)
    of_channel = {"scale": lambda op, own, x: x * own.values[:, None, None]}
    of_number = {"softplus": lambda op, own, x: np.log1p(np.exp(x))}
    for name, function in (of_channel | of_number).items():
        monkeypatch.setattr(reference_layers, name, function, raising=False)
    knowing(monkeypatch, Scale, lambda tensor: Op(scale, tensor))
    knowing(monkeypatch, nn.Softplus, lambda tensor: Op(Kind.ACT, tensor, act=softplus))
    net = nn.Sequential(conv(), nn.ReLU(), Scale(4), nn.Softplus(), conv(4, 4), nn.Softplus(), Scale(4), head())
    return scramble(net).eval()


def test_a_new_layer_is_compiled_counted_and_saved(model: nn.Module, tmp_path: Path) -> None:
    program, values = models.compile(model, input_shape=SMALL)
    check_program(program)
    assert [op.kind.name for op in program.ops] == ["CONV", "SCALE", "CONV", "SCALE", "POOL", "CONV"]
    assert [op.act.name for op in program.ops] == ["RELU", "SOFTPLUS", "SOFTPLUS", "NONE", "NONE", "NONE"]
    assert [layer.n_values for layer in program.layers()] == [76, 4, 148, 4, 0, 15]
    assert forward_flops(program) == 2 * (72 * 64 + 4 * 64 + 144 * 64 + 4 * 64 + 12)
    program.save(tmp_path / "model.fsp", values)
    assert load(tmp_path / "model.fsp").program.bytes == program.bytes
    models.restore(model, program, array("f", range(program.n_live)))
    assert model[2].weight.flatten().tolist() == [76, 77, 78, 79]


def assert_torch_and_onnx_say(expected: Any, model: nn.Module, program: Program, records: Any) -> None:
    """That the torch process and the ONNX graph of a program come to these logits."""
    runtime = pytest.importorskip("onnxruntime")
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, *SMALL)).float()
    images = pixels * torch.tensor(program.scale).view(-1, 1, 1) + torch.tensor(program.shift).view(-1, 1, 1)
    own = [[model.get_parameter(f"{p.layer.name}.{name}") for name in p.parameters] for p in program.places]
    np.testing.assert_allclose(logits(program, own, images).detach(), expected, rtol=1e-4, atol=1e-5)

    graph = onnx_model(program, {name: p.detach().numpy() for name, p in model.named_parameters()}, as_inputs=False)
    session = runtime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (log_probabilities,) = session.run(None, {IMAGES: images.numpy()})
    wanted = torch.from_numpy(expected).log_softmax(1)
    np.testing.assert_allclose(log_probabilities, wanted, rtol=1e-4, atol=1e-5)


def test_a_new_layer_computes_alike_in_numpy_torch_and_onnx(model: nn.Module) -> None:
    mask, records = random_mask(model, 0.5), shard(SMALL, 3)
    for name, keep in mask.items():
        model.get_parameter(name).data.mul_(keep)
    program, values = models.compile(model, mask, input_shape=SMALL)
    expected = torch_logits(model, program, records)
    given = ReferenceEngine(program).logits(values, Samples.records(records, program.image_bytes))
    np.testing.assert_allclose(np.reshape(given, expected.shape), expected, rtol=1e-4, atol=1e-5)

    assert_torch_and_onnx_say(expected, model, program, records)


def test_what_backpropagation_saves_of_a_new_layer_is_counted(model: nn.Module) -> None:
    program, _ = models.compile(model, input_shape=SMALL)
    assert planned_bp_bytes(program, 3, False).activations == saved_by_torch(model, SMALL, 3)


# --- what has no entry ---


@pytest.fixture(params=["kind", "act", "pool"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program with an op that loses its entry after it was assembled."""
    halve = (2, 2, 2, 2, 0, 0)
    ops = [
        Op(Kind.CONV, 0, channels=4, groups=1, window=(1, 1, 1, 1, 0, 0)),
        Op(Kind.ADD, 1, b=1, act=Act.HARDSWISH),
        Op(Kind.POOL, 2, pool=Pool.AVERAGE, pool_window=halve),
        Op(Kind.CONV, 3, channels=3, groups=1, window=(1, 1, 1, 1, 0, 0), pool=Pool.MAX, pool_window=halve),
    ]
    assembled = assemble((2, 4, 4), 3, [1.0] * 2, [0.0] * 2, ops, [None] * 4)
    table: dict[str, tuple[Any, IntEnum]] = {
        "kind": (KINDS, Kind.ADD),
        "act": (ACTS, Act.HARDSWISH),
        "pool": (POOLS, Pool.AVERAGE),
    }
    monkeypatch.delitem(*table[request.param])
    return Program(assembled.bytes)


READERS: dict[str, Callable[[Program], object]] = {
    "shapes": Program.shapes,
    "layers": Program.layers,
    "live weights": lambda program: list(program.live()),
    "rules": check_program,
    "reference": ReferenceEngine,
    "flops": forward_flops,
    "memory": lambda program: planned_bp_bytes(program, 1, True),
    "torch": lambda program: logits(program, [], torch.zeros(1, 2, 4, 4)),
    "onnx": lambda program: onnx_model(program, {}, True),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_has_no_entry_is_refused_by_every_reader_in_one_sentence(program: Program, reader: str) -> None:
    with pytest.raises(ProgramError, match=r"has no entry in the table of foreseed\.engine\.parts"):
        READERS[reader](program)


@pytest.mark.parametrize(("layer", "key"), [(nn.ReLU(), (ACTS, Act.RELU)), (nn.MaxPool2d(2), (POOLS, Pool.MAX))])
def test_what_has_no_entry_is_not_compiled(monkeypatch: pytest.MonkeyPatch, layer: nn.Module, key: Any) -> None:
    monkeypatch.delitem(*key)
    with pytest.raises(ProgramError, match="has no entry"):
        models.compile(nn.Sequential(conv(), layer, head()), input_shape=SMALL)


def test_a_batch_norm_without_its_statistics_is_no_onnx_graph() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), head())
    compiled, _ = models.compile(model, input_shape=SMALL)
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    with pytest.raises(ProgramError, match=r"needs 1\.running_mean"):
        onnx_model(compiled, arrays, as_inputs=True)


@pytest.mark.parametrize("excited_by", ["convs", "rows"])
def test_layers_of_version_2_compute_alike_in_torch_and_onnx(excited_by: str) -> None:

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.shared(torch.nn.functional.relu6(m.shared(torch.cat([m.first(x), x], 1))))
        means = y.mean((2, 3), keepdim=True)
        by_rows = m.excite(means.flatten(1)).sigmoid().view(x.size(0), 6, 1, 1) if excited_by == "rows" else None
        y = m.smooth(y * (m.gate(means) if by_rows is None else by_rows))
        return m.out(m.norm(y).mean((2, 3)))

    layers = {
        "first": conv(), "shared": conv(6, 6), "gate": nn.Sequential(nn.Conv2d(6, 6, 1), nn.Hardsigmoid()),
        "excite": nn.Linear(6, 6), "norm": nn.GroupNorm(2, 6), "out": nn.Linear(6, 3),
        "smooth": nn.Sequential(
            nn.SiLU(), nn.ZeroPad2d((1, 0, 2, 0)), nn.Conv2d(6, 6, 2, dilation=2), nn.Tanh(), nn.GELU(),
            nn.GELU("tanh"), nn.LeakyReLU(0.2), nn.MaxPool2d(2, ceil_mode=True),
        ),
    }  # fmt: skip
    model = scramble(NetOf(forward, **layers)).eval()
    program, _ = models.compile(model, input_shape=SMALL)
    records = shard(SMALL, 3)
    expected = torch_logits(model, program, records)
    assert_torch_and_onnx_say(expected, model, program, records)

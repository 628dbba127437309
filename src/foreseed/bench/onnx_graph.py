"""A program's dense model as an ONNX graph, for the contender that runs it with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import TensorProto, helper, numpy_helper

from foreseed.engine.program import Act, Kind, Op, Pool, Program, unknown

IMAGES, RESULT = "images", "log_probabilities"

_WHERE = "the ONNX graph of the benchmark"
_ACTS = {Act.RELU: "Relu", Act.HARDSWISH: "HardSwish"}


def onnx_model(program: Program, parameters: Mapping[str, Any], as_inputs: bool) -> Any:
    """An ONNX model from images to log-probabilities.

    The parameters (NumPy arrays by name) are inputs of the graph, or constants in it, which ONNX Runtime can rearrange
    to its liking when a session starts.
    """
    nodes = _Nodes(program, parameters)
    for number in range(len(program.ops)):
        nodes.add_op(number)
    nodes.add("LogSoftmax", [nodes.names[-1]], RESULT, axis=1)
    inputs = [helper.make_tensor_value_info(IMAGES, TensorProto.FLOAT, ["n", *program.input_shape])]
    constants = []
    for name, parameter in parameters.items():
        if as_inputs:
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, parameter.shape))
        else:
            constants.append(numpy_helper.from_array(parameter, name))
    output = helper.make_tensor_value_info(RESULT, TensorProto.FLOAT, ["n", program.classes])
    graph = helper.make_graph(nodes.nodes, "model", inputs, [output], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class _Nodes:
    """The nodes of a graph in the making; `names` are those of the program's tensors, `flat` the rank-2 ones."""

    def __init__(self, program: Program, parameters: Mapping[str, Any]) -> None:
        self.nodes: list[Any] = []
        self.names = [IMAGES]
        self._flat: set[str] = set()
        self._program, self._parameters = program, parameters
        self._layers, self._shapes = program.layers(), program.shapes()

    def add(self, kind: str, inputs: list[str], output: str | None = None, **attributes: Any) -> str:
        name = output or f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def add_op(self, number: int) -> None:
        op, layer = self._program.ops[number], self._layers[number].name
        name = self.names[op.a]
        if op.kind is Kind.CONV:
            name = self._conv(op, name, layer)
        elif op.kind is Kind.NORM and op.groups:
            affine = [name, f"{layer}.weight", f"{layer}.bias"]
            name = self.add("GroupNormalization", affine, num_groups=op.groups, epsilon=op.eps)
        elif op.kind is Kind.ADD:
            name = self.add("Add", [name, self.names[op.b]])
        elif op.kind not in (Kind.POOL, Kind.ACT):
            raise unknown("op kind", "batch norm" if op.kind is Kind.NORM else op.kind, _WHERE)
        if op.act is not Act.NONE:
            if op.act not in _ACTS:
                raise unknown("activation", op.act, _WHERE)
            flat = name in self._flat
            name = self.add(_ACTS[op.act], [name])
            self._flat |= {name} if flat else set()
        if op.pool is not Pool.NONE:
            name = self._pool(op, name)
        self.names.append(name)

    def _conv(self, op: Op, name: str, layer: str) -> str:
        inputs = [name, f"{layer}.weight"] + ([f"{layer}.bias"] if op.has_parameters else [])
        if self._parameters[inputs[1]].ndim == 4:
            return self.add("Conv", inputs, **_window(op.window), group=op.groups)
        if name not in self._flat:
            inputs[0] = self.add("Flatten", [name])
        result = self.add("Gemm", inputs, transB=1)
        self._flat.add(result)
        return result

    def _pool(self, op: Op, name: str) -> str:
        if op.pool is Pool.MAX:
            return self.add("MaxPool", [name], **_window(op.pool_window))
        if op.pool not in (Pool.AVERAGE, Pool.AVERAGE_INSIDE):
            raise unknown("pool", op.pool, _WHERE)
        return self.add("AveragePool", [name], **_window(op.pool_window), count_include_pad=op.pool is Pool.AVERAGE)


def _window(window: tuple[int, ...]) -> dict[str, Any]:
    kh, kw, sh, sw, ph, pw = window
    return {"kernel_shape": [kh, kw], "strides": [sh, sw], "pads": [ph, pw, ph, pw]}

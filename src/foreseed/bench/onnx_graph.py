"""A program's dense model as an ONNX graph, for the contender that runs it with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import TensorProto, helper, numpy_helper

from foreseed.engine.program import Program
from foreseed.engine.walker import Stage, run

IMAGES, RESULT = "images", "log_probabilities"


def onnx_model(program: Program, parameters: Mapping[str, Any], as_inputs: bool) -> Any:
    """An ONNX model from images to log-probabilities.

    The parameters (NumPy arrays by name) are inputs of the graph, or constants in it, which ONNX Runtime can rearrange
    to its liking when a session starts.
    """
    graph, layers = Graph(parameters), program.layers()

    def add(stage: Stage, x: list[str]) -> str:
        layer = layers[stage.owner]
        own = [f"{layer.name}.{name}" for name in stage.part.parameters(stage.op, stage.shape)]
        return str(stage.part.onnx(graph, stage.op, x, own))

    graph.add("LogSoftmax", [run(program.places, IMAGES, add)], RESULT, axis=1)
    inputs = [helper.make_tensor_value_info(IMAGES, TensorProto.FLOAT, ["n", *program.input_shape])]
    constants = []
    for name, parameter in parameters.items():
        if as_inputs:
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, parameter.shape))
        else:
            constants.append(numpy_helper.from_array(parameter, name))
    output = helper.make_tensor_value_info(RESULT, TensorProto.FLOAT, ["n", program.classes])
    proto = helper.make_graph(graph.nodes, "model", inputs, [output], constants)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class Graph:
    """The nodes of a graph in the making, and which of its tensors are flat: rows of numbers, not of maps."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.nodes: list[Any] = []
        self._flat = {name for name, parameter in parameters.items() if parameter.ndim == 2}

    def add(self, kind: str, inputs: Sequence[str], output: str | None = None, **attributes: Any) -> str:
        """Append a node and give the name of what it makes, flat if its first input is."""
        name = output or f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        if kind == "Flatten" or (inputs and self.is_flat(inputs[0])):
            self._flat.add(name)
        return name

    def constant(self, value: float | list[int]) -> str:
        """A number, or a row of whole numbers."""
        if isinstance(value, float):
            return self.add("Constant", [], value_float=value)
        return self.add("Constant", [], value_ints=value)

    def alike(self, names: Sequence[str]) -> list[str]:
        """Tensors that a node takes together: all flat, or all maps."""
        if all(map(self.is_flat, names)):
            return list(names)
        return [self._as_map(name) if self.is_flat(name) else name for name in names]

    def _as_map(self, name: str) -> str:
        made = self.add("Unsqueeze", [name, self.constant([2, 3])])
        self._flat.discard(made)
        return made

    def is_flat(self, name: str) -> bool:
        return name in self._flat

    def flatten(self, name: str) -> str:
        return name if self.is_flat(name) else self.add("Flatten", [name])

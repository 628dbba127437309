"""A program as the nodes of an ONNX graph, each part by its entry in `foreseed.engine.parts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from foreseed.engine.errors import ProgramError
from foreseed.engine.program import Program
from foreseed.engine.walker import Stage, run

IMAGES = "images"


class Graph:
    """The nodes of a graph in the making, and which of its tensors are flat: rows of numbers, not of maps."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """`parameters` are NumPy arrays by name; they become constants or inputs, as `model` is told."""
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.channels = 0
        """Of the tensor that the next part reads."""
        self._parameters = parameters
        self._flat = {name for name, parameter in parameters.items() if parameter.ndim == 2}

    def add(self, kind: str, inputs: Sequence[str], output: str | None = None, **attributes: Any) -> str:
        """Append a node and give the name of what it makes, flat if its first input is."""
        name = output or f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        if kind == "Flatten" or self.is_flat(inputs[0]):
            self._flat.add(name)
        return name

    def constant(self, numbers: Any) -> str:
        """Add a tensor of float32 numbers, or of whole ones (ints), and give its name."""
        array, name = np.asarray(numbers), f"constant{len(self.constants)}"
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

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

    def program(self, program: Program, images: str) -> str:
        """Append a program that reads normalised images, and give the name of its result."""
        layers = program.layers()

        def part(stage: Stage, x: list[str]) -> str:
            self.channels = stage.shape[0]
            held = (*stage.part.parameters(stage.op, stage.shape), *stage.part.statistics(stage.op, stage.shape))
            own = [f"{layers[stage.owner].name}.{name}" for name in held]
            if missing := [name for name in own if name not in self._parameters]:
                raise ProgramError(f"an ONNX graph needs {missing[0]}, which was not given; give all, statistics too")
            return str(stage.part.onnx(self, stage.op, x, own))

        return run(program.places, images, part)

    def model(
        self, images: Any, outputs: Mapping[str, Sequence[str | int]], parameters_as_inputs: bool = False, **about: Any
    ) -> Any:
        """The ONNX model of these nodes, from images (a ValueInfoProto) to outputs of float32, by name and shape."""
        inputs, constants = [images], list(self.constants)
        for name, parameter in self._parameters.items():
            if parameters_as_inputs:
                inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, parameter.shape))
            else:
                constants.append(numpy_helper.from_array(parameter, name))
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
        proto = helper.make_graph(self.nodes, "model", inputs, made, constants)
        return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, **about)

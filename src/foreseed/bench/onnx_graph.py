"""A program's dense model as an ONNX graph, for the contender that runs it with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import TensorProto, helper

from foreseed.engine.program import Program
from foreseed.trained.onnx_graph import IMAGES, Graph

__all__ = ["IMAGES", "onnx_model"]


def onnx_model(program: Program, parameters: Mapping[str, Any], as_inputs: bool) -> Any:
    """An ONNX model from normalised images to log-probabilities.

    The parameters (NumPy arrays by name) are inputs of the graph, or constants in it, which ONNX Runtime can rearrange
    to its liking when a session starts.
    """
    graph, result = Graph(parameters), "log_probabilities"
    graph.add("LogSoftmax", [graph.program(program, IMAGES)], result, axis=1)
    images = helper.make_tensor_value_info(IMAGES, TensorProto.FLOAT, ["n", *program.input_shape])
    return graph.model(images, {result: ["n", program.classes]}, parameters_as_inputs=as_inputs)

"""A model for ONNX: uint8 images in, logits and probabilities out, the normalisation inside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from foreseed import __version__
from foreseed.engine.files import write_whole
from foreseed.trained.model import ExportError, Trained


def write_onnx(trained: Trained, out: Path) -> list[Path]:
    """Write a model that ONNX's own checker has passed; the names of the classes are in its metadata."""
    try:
        from onnx import TensorProto, checker, helper
    except ModuleNotFoundError:
        raise ExportError("--to onnx needs the package onnx; pip install 'foreseed[onnx]'") from None
    from foreseed.trained.onnx_graph import IMAGES, Graph

    program, graph = trained.program, Graph(trained.arrays())
    scale, shift = (graph.constant(np.reshape(x, (-1, 1, 1))) for x in (program.scale, program.shift))
    pixels = graph.add("Cast", [IMAGES], to=TensorProto.FLOAT)
    result = graph.program(program, graph.add("Add", [graph.add("Mul", [pixels, scale]), shift]))
    graph.add("Softmax", [graph.add("Flatten", [result], "logits")], "probabilities", axis=1)
    images = helper.make_tensor_value_info(IMAGES, TensorProto.UINT8, ["n", *program.input_shape])
    rows: list[str | int] = ["n", program.classes]
    model = graph.model(
        images, {"logits": rows, "probabilities": rows}, producer_name="foreseed", producer_version=__version__,
        doc_string=f"{trained.config.model.name}, trained by foreseed. Images are bytes; they are normalised inside.",
    )  # fmt: skip
    helper.set_model_props(model, {"classes": json.dumps(trained.classes), "run": trained.config.run_name})
    checker.check_model(model, full_check=True)
    write_whole(out, model.SerializeToString())
    return [out]

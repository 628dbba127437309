"""Torch models, and the compiler that makes programs of them."""

from foreseed.models.binding import Binding, bind, restore, stats
from foreseed.models.compiler import compile
from foreseed.models.errors import MaskError, ModelError, UnknownModelError, UnsupportedLayerError, WeightsError
from foreseed.models.weights import load_weights
from foreseed.models.zoo import (
    MODELS,
    build,
    dscnn,
    lenet5,
    lenet5_wide,
    mobilenetv2_tiny,
    mobilenetv3_small,
    resnet20,
    squeezenet,
)

__all__ = [
    "MODELS",
    "Binding",
    "MaskError",
    "ModelError",
    "UnknownModelError",
    "UnsupportedLayerError",
    "WeightsError",
    "bind",
    "build",
    "compile",
    "dscnn",
    "lenet5",
    "lenet5_wide",
    "load_weights",
    "mobilenetv2_tiny",
    "mobilenetv3_small",
    "resnet20",
    "restore",
    "squeezenet",
    "stats",
]

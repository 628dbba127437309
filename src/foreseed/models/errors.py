"""The errors that a model, a mask or a model's name can cause."""

from foreseed.engine.errors import ForeseedError


class ModelError(ForeseedError):
    """A model that cannot be built or compiled; base of the errors of this room."""


class UnsupportedLayerError(ModelError):
    """A layer, function or option that has no op in a program."""


class MaskError(ModelError):
    """A mask that does not fit its model."""


class WeightsError(ModelError):
    """A file of weights that cannot be read, or does not fit its model."""


class UnknownModelError(ModelError):
    """A model's name that stands for no model."""

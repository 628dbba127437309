"""The errors of pruning that a user can meet."""

from foreseed.engine.errors import ForeseedError
from foreseed.models.errors import MaskError as MaskError


class PruneError(ForeseedError):
    """A pruning that cannot be done as asked: an unknown pruner, a density out of range, data that do not fit."""

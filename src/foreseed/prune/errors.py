"""The errors of pruning that a user can meet."""

from foreseed.engine.errors import ForeseedError


class PruneError(ForeseedError):
    """A pruning that cannot be done as asked: an unknown pruner, a density out of range, data that do not fit."""


class MaskError(ForeseedError):
    """A mask, or the file of one, that is damaged or does not fit its model."""

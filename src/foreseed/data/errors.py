"""The errors of the data room."""

from foreseed.engine.errors import ForeseedError


class DataError(ForeseedError):
    """A data set that is not there, cannot be had, or is not what it should be."""


class PartitionError(ForeseedError):
    """A way of sharing samples out over devices that cannot be done."""

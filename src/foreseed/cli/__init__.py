"""The command line: `foreseed`."""

from foreseed.cli.app import main

__all__ = ["main"]

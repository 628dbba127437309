"""The command line: `foreseed`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `foreseed` and give its exit code; where a device alone is installed, say what else it takes."""
    try:
        from foreseed.cli import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "foreseed":
            raise
        print(
            f"foreseed: this is the device side alone ({missing.name} is not installed); for the server side, "
            "pip install 'foreseed[server]'; a device is started with foreseed-device",
            file=sys.stderr,
        )
        return 2
    return app.main(arguments)

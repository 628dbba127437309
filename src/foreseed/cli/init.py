"""`foreseed init`: a folder to start from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from foreseed.engine.errors import ForeseedError

_FILES = ("experiment.toml", "mynet.py", "README.md")


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder; it is made if need be.")]) -> None:
    """Write an experiment, a model to edit and a README into a folder; nothing that is there is overwritten.

    Example: foreseed init first
    """
    taken = [name for name in _FILES if (folder / name).exists()]
    if taken:
        raise ForeseedError(f"{folder} has {', '.join(taken)} already, which would be lost; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            (folder / name).write_bytes((resources.files("foreseed") / "start" / name).read_bytes())
    except OSError as error:
        raise ForeseedError(f"{folder}: cannot write there ({error.strerror}); give another folder") from None
    for name in _FILES:
        print(folder / name)
    print(f"next:\n  cd {quote(str(folder))}\n  foreseed run experiment.toml")

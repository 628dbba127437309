"""`foreseed export`, `predict` and `evaluate`: what to do with a trained model."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from foreseed.cli.experiment import Json

# Heavy rooms are imported by the commands that need them: `--help` stays quick.

Run = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Ema = Annotated[bool, typer.Option("--ema", help="The moving average of the weights, of a run with train.ema.")]


class To(StrEnum):
    """What a model may be exported to."""

    TORCH = "torch"
    ONNX = "onnx"
    FSP = "fsp"
    C = "c"


_USE = {
    To.TORCH: "use it: from {module} import inputs, model",
    To.ONNX: "use it: input 'images', uint8 [n, {shape}]; outputs 'logits' and 'probabilities'",
    To.FSP: "use it: foreseed.engine.load({first!r}); values are little-endian float32 (docs/format.md)",
    To.C: "use it: make -C {folder}; main.c says the rest",
}


def export(
    run: Run,
    to: Annotated[To, typer.Option(help="torch: a state_dict; onnx; fsp: a program file; c: a folder for firmware.")],
    out: Annotated[
        Path | None, typer.Option(help="The file (c: folder) to write; RUN's name, here, if not given.")
    ] = None,
    ema: Ema = False,
    as_json: Json = False,
) -> None:
    """Write a run's model for others to use.

    Example: foreseed export runs/ntk-baffle --to onnx --out digits.onnx
    """
    from foreseed.trained import export as write
    from foreseed.trained import read_trained

    trained = read_trained(run, ema)
    files = write(trained, to, out)
    if as_json:
        print(json.dumps({"files": [str(file) for file in files]}))
        return
    for file in files:
        print(file)
    first, shape = files[0], ", ".join(map(str, trained.program.input_shape))
    print(_USE[to].format(module=files[-1].stem, shape=shape, first=str(first), folder=first.parent))


def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(help="Image files (PNG, JPEG), or folders of them.")],
    ema: Ema = False,
    as_json: Json = False,
) -> None:
    """Say what is on images, with how likely that is.

    Example: foreseed predict runs/ntk-baffle photo.png more/
    """
    from foreseed.trained import image_files, predict_files, read_trained

    files = image_files(images)
    found = predict_files(read_trained(run, ema), files)
    if as_json:
        print(json.dumps([{"file": str(file), **one._asdict()} for file, one in zip(files, found, strict=True)]))
        return
    for file, one in zip(files, found, strict=True):
        print(f"{file}: {one.name} {100 * one.probability:.1f} %")


def evaluate(
    run: Run,
    data: Annotated[str, typer.Argument(help="A data set, a folder or an .npz file; the run's own if not given.")] = "",
    ema: Ema = False,
    as_json: Json = False,
) -> None:
    """Test a run's model on the test images of its own data, or of other data.

    Example: foreseed evaluate runs/ntk-baffle photos/
    """
    from foreseed.trained import evaluate as test
    from foreseed.trained import read_trained

    found = test(read_trained(run, ema), data)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    table = Table("class", "images", "accuracy", "loss")
    for name, score in found.classes.items():
        table.add_row(name, f"{score.images:,}", f"{100 * score.accuracy:.2f} %", f"{score.loss:.4f}")
    table.add_section()
    table.add_row("all", f"{found.images:,}", f"{100 * found.accuracy:.2f} %", f"{found.loss:.4f}")
    console = Console(markup=False, highlight=False)
    console.print(f"{found.data}: {found.images:,} images")
    console.print(table)

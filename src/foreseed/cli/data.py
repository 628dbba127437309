"""`foreseed data`: list, get, info, shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from foreseed import data

app = typer.Typer(no_args_is_help=True, help="Data sets: list them, get them, look at them, write device shards.")

Root = Annotated[Path | None, typer.Option(help="Where data lies; $FORESEED_DATA or the user's cache if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_sets(root: Root = None, as_json: Json = False) -> None:
    """The data sets that have a name, and whether they are here.

    Example: foreseed data list
    """
    rows = [(entry.name, entry.summary, data.where(entry.name, root)) for entry in data.SETS.values()]
    if as_json:
        print(json.dumps([{"name": n, "summary": s, "path": None if p is None else str(p)} for n, s, p in rows]))
        return
    table = Table("name", "what it is", "where")
    for name, summary, path in rows:
        built_in = not data.SETS[name].packages
        table.add_row(name, summary, "built in" if built_in else str(path or f"not here: foreseed data get {name}"))
    Console().print(table)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="The data set.")],
    root: Root = None,
    source: Annotated[Path | None, typer.Option("--from", help="A file or folder that is already on disk.")] = None,
) -> None:
    """Download a data set (or take it from disk), check it, and unpack it.

    Example: foreseed data get cifar10 --from cifar-10-binary.tar.gz
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as live:
        tasks: dict[str, TaskID] = {}

        def watch(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = live.add_task(file, total=total)
            live.update(tasks[file], completed=done)

        path = data.get(name, root, source, watch)
    print(f"{name}: {'built in, nothing to get' if path is None else path}")


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="The data set, a folder of images, or an .npz file.")],
    root: Root = None,
    size: Annotated[int, typer.Option(min=0, help="As data.size of an experiment.")] = 0,
    channels: Annotated[int, typer.Option(min=0, help="As data.channels of an experiment.")] = 0,
    as_json: Json = False,
) -> None:
    """Shape, classes and sizes of a data set, and what is made of images of your own.

    Example: foreseed data info ./photos --size 64
    """
    found = data.load(name, root, size, channels)
    facts = {
        "name": found.name, "from": data.origin(name, size, channels), "shape": found.shape, "classes": found.classes,
        "train": len(found.train_labels), "test": len(found.test_labels), "mean": found.mean, "std": found.std,
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts))
        return
    for key, value in facts.items():
        print(f"{key}: {', '.join(map(str, value)) if isinstance(value, tuple) else value}")


@app.command()
def shard(
    words: Annotated[list[str] | None, typer.Argument(help="An experiment file, then key=value overrides.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("shards"),
) -> None:
    """Write one file a device, as the experiment's partition says, with a picture of the partition.

    Example: foreseed data shard demo data.devices=5 --out shards
    """
    from foreseed.cli.experiment import config_of
    from foreseed.simulate.population import partition_of

    config = config_of(words or [])
    dataset = data.load(*config.data.source)
    partition = partition_of(config, dataset.train_labels)
    index = data.write_shards(dataset, partition, out)
    data.picture(partition, dataset.classes, out / "partition.png")
    sizes = partition.sizes
    print(
        f"{len(sizes)} shards of {sizes.min()} to {sizes.max()} samples "
        f"({partition.moved} moved to reach the minimum): {index}"
    )

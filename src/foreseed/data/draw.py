"""A picture of who holds what."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreseed.data.errors import DataError
from foreseed.data.files import write_whole
from foreseed.data.partition import Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[np.float64]

_NUMBERED_DEVICES = 40
"""Up to so many devices stand in the order of their numbers; more are sorted."""
_STACKED_DEVICES = 400
"""Up to so many devices have bars wide enough to show their classes; of more only the sizes are drawn."""
_NAMED_CLASSES = 20
"""Up to so many classes are all named and have a colour each; of more, every so many are named."""


def picture(partition: Partition, classes: Sequence[str], path: str | os.PathLike[str]) -> Path:
    """Draw the samples of each device by class as `path` (.svg or .png), and write the numbers beside it as .csv.

    Above, how many samples each device holds; below, a row for each class, the stronger its colour the larger the
    part of the device's samples that are of it, so that the smallest device can be read as well as the largest.
    Returns the path of the CSV file.
    """
    target = Path(path)
    if target.suffix not in (".svg", ".png"):
        raise DataError(f"{target}: cannot draw a {target.suffix or 'file without a suffix'}; expected .svg or .png")
    if len(classes) < partition.class_counts.shape[1]:
        raise DataError(
            f"{len(classes)} class names for a partition with {partition.class_counts.shape[1]} classes; name them all"
        )
    write_whole(target, _draw(partition, classes, target.suffix[1:]))
    table = target.with_suffix(".csv")
    write_whole(table, _table(partition, classes))
    return table


def _table(partition: Partition, classes: Sequence[str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = classes[: partition.class_counts.shape[1]]
    writer.writerow(["device", "samples", *names])
    for device, (size, counts) in enumerate(zip(partition.sizes, partition.class_counts, strict=True)):
        writer.writerow([device, size, *counts])
    return text.getvalue().encode()


def _draw(partition: Partition, classes: Sequence[str], kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.edgecolor": "#888888", "axes.labelcolor": "#222222", "xtick.color": "#444444", "ytick.color": "#444444",
        "svg.hashsalt": "foreseed",
    }  # fmt: skip
    colours = _colours(partition.class_counts.shape[1])
    with mpl.rc_context(style):
        figure = Figure(figsize=(10, 6), layout="constrained")
        above, below = figure.subplots(2, 1)
        above.set_title(_headline(partition), loc="left", color="#222222")
        _draw_sizes(above, partition, colours)
        _draw_mix(below, partition, colours, classes)
        for axes in (above, below):
            axes.xaxis.set_major_formatter("{x:,.0f}")
            if len(partition.sizes) <= _NUMBERED_DEVICES:
                axes.set_xticks(np.arange(len(partition.sizes)))
        result = io.BytesIO()
        figure.savefig(result, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
    return result.getvalue()


def _headline(partition: Partition) -> str:
    sizes = partition.sizes
    held = (partition.class_counts > 0).sum(axis=1)
    text = (
        f"{sizes.sum():,} samples on {len(sizes):,} {'device' if len(sizes) == 1 else 'devices'}: "
        f"{sizes.min():,} to {sizes.max():,} each (median {np.median(sizes):,.0f}), "
        f"{held.mean():.1f} classes on average"
    )
    return f"{text}, {partition.moved:,} samples moved" if partition.moved else text


def _colours(n: int) -> Array:
    """A colour for each class, [classes, red green blue]."""
    import matplotlib as mpl

    if n <= _NAMED_CLASSES:
        palette = [mpl.colormaps["tab10" if n <= 10 else "tab20"](i) for i in range(n)]
    else:
        palette = [mpl.colormaps["turbo"](i / (n - 1)) for i in range(n)]
    return np.array(palette)[:, :3]


def _draw_sizes(axes: Axes, partition: Partition, colours: Array) -> None:
    """Bars of the samples of each device, by class where there is room for it."""
    n = len(partition.sizes)
    numbered = n <= _NUMBERED_DEVICES
    order = np.arange(n) if numbered else np.argsort(-partition.sizes, kind="stable")
    edges = np.arange(n + 1) - 0.5
    if n > _STACKED_DEVICES:
        axes.stairs(partition.sizes[order], edges, fill=True, color="#7f8ea3")
    else:
        top = np.cumsum(partition.class_counts[order], axis=1)
        for c, colour in enumerate(colours):
            # One outline a class, however many devices.
            low = top[:, c] - partition.class_counts[order, c]
            axes.stairs(top[:, c], edges, baseline=low, fill=True, color=tuple(colour), lw=0)
        axes.vlines(edges, 0, axes.get_ylim()[1], color="white", lw=min(3.0, 50 / n))
    axes.set_xlim(-0.5, n - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("device" if numbered else "devices, largest first")


def _draw_mix(axes: Axes, partition: Partition, colours: Array, classes: Sequence[str]) -> None:
    """An image with a row a class and a column a device."""
    n, rows = partition.class_counts.shape
    shares = partition.class_counts / np.maximum(partition.sizes, 1)[:, None]
    numbered = n <= _NUMBERED_DEVICES
    if not numbered:
        shares = shares[np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))]
    # A root, as a class with a tenth of the samples should be seen.
    strength = np.sqrt(shares.T / shares.max())[:, :, None].astype(np.float32)
    image = 1 - strength * (1 - colours[:, None].astype(np.float32))
    axes.imshow(image, aspect="auto", interpolation="nearest")
    named = range(rows) if rows <= _NAMED_CLASSES else [round(i * (rows - 1) / 11) for i in range(12)]
    axes.set_yticks(named, [classes[c] for c in named])
    for c, label in zip(named, axes.get_yticklabels(), strict=True):
        label.set_color(tuple(colours[c] * 0.8))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("device" if numbered else "devices, by the class that they have most of")

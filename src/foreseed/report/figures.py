"""The figures of a report, each as SVG and PNG with its numbers as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreseed.report import bars, curves, estimates, sweeps
from foreseed.report.arms import Arm
from foreseed.report.canvas import Drawing, style, table_text
from foreseed.report.words import listed
from foreseed.runs import Run
from foreseed.runs.folder import read_text


def draw_figures(
    arms: Sequence[Arm], folder: Path, swept: tuple[Sequence[Arm], Sequence[str]] | None = None
) -> list[Drawing]:
    """Draw all that the arms give into a folder, in the order of the report; of a sweep, all its arms and its keys."""
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style()):
        drawings = [] if swept is None else [sweeps.sweep(*swept, folder)]
        drawings += [curves.accuracy(arms, spent, folder) for spent in curves.SPENT]
        others = (curves.loss(arms, folder), estimates.signal(arms, folder))
        drawings += [drawing for drawing in others if drawing is not None]
        return [*drawings, bars.memory(arms, folder), *bars.layers(arms, folder), *partitions(arms, folder)]


def partitions(arms: Sequence[Arm], folder: Path) -> list[Drawing]:
    """The samples of the devices, once for each way in which they were shared out."""
    ways: dict[tuple[object, ...], list[tuple[Arm, Run]]] = {}
    for arm in arms:
        for run in arm.runs:
            ways.setdefault((run.summary.data, run.summary.partition), []).append((arm, run))
    found = []
    for i, users in enumerate(ways.values(), 1):
        name = "partition" if i == 1 else f"partition-{i}"
        whose = "" if len(ways) == 1 else f" ({_whose(users)})"
        found.append(_partition(users[0][1], folder, name, whose))
    return found


def _whose(users: Sequence[tuple[Arm, Run]]) -> str:
    names = listed(list(dict.fromkeys(arm.label for arm, _ in users)))
    seeds = sorted({run.summary.seed for _, run in users})
    return f"{names}, {'seed' if len(seeds) == 1 else 'seeds'} {listed([str(s) for s in seeds])}"


def _partition(run: Run, folder: Path, name: str, whose: str) -> Drawing:
    """The picture that the run itself drew with its classes, or else the sizes alone."""
    sizes = run.summary.partition.sizes
    devices = "one device" if len(sizes) == 1 else f"{len(sizes):,} devices, {min(sizes):,} to {max(sizes):,} on each"
    said = ", as they said when they answered" if run.summary.partition.stated else ""
    caption = f"{sum(sizes):,} training samples of {run.summary.data} on {devices}{said}{whose}."
    source = run.folder / "figures" / "partition.svg"
    if not source.is_file():
        name = name.replace("partition", "device_sizes")
        svg, numbers = bars.sizes(sizes, folder, name)
        return Drawing(name, "data", "Samples of each device", caption, svg, numbers)
    parts = {suffix: source.with_suffix(suffix) for suffix in (".svg", ".png", ".csv")}
    for suffix, part in parts.items():
        copy = folder / f"{name}{suffix}"
        if part.is_file() and part.resolve() != copy.resolve():
            copy.write_bytes(part.read_bytes())
    table = parts[".csv"]
    numbers = read_text(table) if table.is_file() else table_text(["device", "samples"], enumerate(sizes))
    return Drawing(name, "data", "Who holds what", caption, read_text(source), numbers, source)

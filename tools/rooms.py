"""Draw docs/rooms.svg, the rooms and who may import whom, from the contracts in pyproject.toml.

python tools/rooms.py > docs/rooms.svg
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

HOLDS = {
    "cli": "the foreseed command",
    "bench": "benchmarks to run again",
    "paper": "its tables, made again",
    "sweep": "one experiment, many settings",
    "api": "foreseed from Python: load, run, compare, read",
    "report": "figures and pages of finished runs",
    "trained": "export, predict, evaluate",
    "fleet": "real devices: conductor, keys, broker, test-bed",
    "simulate": "simulated devices, the population that they hold",
    "runs": "the loop, the folder, checkpoints, rows and summary",
    "methods": "one file a method; Task, Devices and State",
    "prune": "saliencies and masks",
    "coordinator": "rounds without I/O",
    "meter": "FLOPs and memory",
    "models": "torch models, compile",
    "data": "sets, partitions, shards",
    "config": "the typed experiment",
    "device": "answers orders; member, agent",
    "transport": "MQTT link, loop, topics",
    "wire": "messages and their encoding",
    "draws": "random numbers, the same anywhere",
    "engine": "programs, forward passes, directions, updates (C, and NumPy as reference)",
}
SMALL = "A device loads no NumPy, no PyTorch and nothing of the server's"
"""The contract whose rooms make up a device."""

LEFT, WIDTH, HEIGHT, GAP, TOP = 64, 800, 46, 10, 44
SERVER, DEVICE = ("#e8eef7", "#3b5b8c"), ("#e5f3e8", "#2f6b3f")


def picture() -> str:
    """The drawing, as SVG."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    small = next(contract["source_modules"] for contract in contracts if contract["name"] == SMALL)
    on_device = {name.removeprefix("foreseed.") for name in small}
    bottom = TOP + len(layers) * (HEIGHT + GAP)
    full = LEFT + WIDTH + 16
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {bottom + 34}" font-family="sans-serif">',
        "<title>The rooms of foreseed, from the top; imports go downwards</title>",
        f'<rect width="{full}" height="{bottom + 34}" fill="#ffffff"/>',
        _text(LEFT, 28, "A room imports any room below it, none beside it, none above it.", "#333333", 15),
        f'<path d="M32 {TOP} V{bottom - GAP - 8}" stroke="#666666" stroke-width="2"/>',
        f'<path d="M25 {bottom - GAP - 12} h14 l-7 12 z" fill="#666666"/>',
        f'<text transform="translate(22 {(TOP + bottom) // 2}) rotate(-90)" text-anchor="middle" '
        'font-size="13" fill="#666666">imports</text>',
    ]
    for row, layer in enumerate(layers):
        rooms = [name.strip() for name in layer.split("|")]
        wide = (WIDTH - GAP * (len(rooms) - 1)) // len(rooms)
        for place, room in enumerate(rooms):
            x, y = LEFT + place * (wide + GAP), TOP + row * (HEIGHT + GAP)
            fill, ink = DEVICE if room in on_device else SERVER
            shapes += [
                f'<rect x="{x}" y="{y}" width="{wide}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="{ink}"/>',
                _text(x + 12, y + 20, room, ink, 15, bold=True),
                _text(x + 12, y + 37, HOLDS[room], "#333333", 12.5),
            ]
    shapes += [
        f'<rect x="{LEFT}" y="{bottom + 6}" width="14" height="14" rx="3" fill="{DEVICE[0]}" stroke="{DEVICE[1]}"/>',
        _text(LEFT + 22, bottom + 18, "a device loads these: no NumPy, no PyTorch", "#333333", 12.5),
        f'<rect x="{LEFT + 320}" y="{bottom + 6}" width="14" height="14" rx="3" fill="{SERVER[0]}" '
        f'stroke="{SERVER[1]}"/>',
        _text(LEFT + 342, bottom + 18, "the server and the simulator", "#333333", 12.5),
        "</svg>",
    ]
    return "\n".join(shapes) + "\n"


def _text(x: int, y: int, words: str, ink: str, size: float, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{ink}"{weight}>{words}</text>'


if __name__ == "__main__":
    print(picture(), end="")

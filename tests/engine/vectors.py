"""What stands in `docs/vectors.json`, made by plain Python alone so that it depends on neither backend.

To write the file anew: `python -c "from tests.engine.vectors import write; write()"` with `src` on the path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foreseed.engine.types import BITS, SHARED_DEVICE, Directions
from tests.engine import plain

PATH = Path(__file__).parents[2] / "docs" / "vectors.json"

# The ends of the range of words, its middle, and both sides of the splits of the inverse normal CDF.
EDGES = [0, 1, 0x7FFFFFFF, 0x7FFFFFFE, 0x80000000, 0x80000001, 0xFFFFFFFF,
         0x6CCCCC40, 0x6CCCCCC0, 0x6CCCCD40, 0x93333340, 0x93333400]  # fmt: skip
COUNTERS = [
    ((0, 0, 0, 0), 0),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822),
]
RUNS = [
    Directions(0, 0, 0, 3, sigma=1e-4),
    Directions(0x0123456789ABCDEF, 7, 3, 3, first=2, step=5, sigma=1e-3),
    Directions(2**64 - 1, 2**32 - 1, SHARED_DEVICE, 3, first=199, kind="rademacher", sigma=0.5),
    Directions(42, 1000, 99, 3, kind="rademacher", sigma=1e-4),
]
# Some as they come, no number of them that fills its bytes; a single one; zeros of both signs; one far from the rest;
# the ends of float32, where none is normal and where all but one are too small for its levels.
TINY, HUGE = 2.0**-149, (2 - 2.0**-23) * 2.0**127
DIFFERENCES = [
    [plain.f32(1e-3 * x) for x in plain.direction(Directions(1, 0, 0, 1), 5, 21)],
    [-0.25], [0.0, -0.0, 0.0], [1e4, -1e-4, 1e-4, 0.0, -1e-4], [TINY, -TINY, 3 * TINY, -5 * TINY, 0.0],
    [HUGE, -HUGE, TINY, -HUGE, 1.0],
]  # fmt: skip


def make_vectors() -> dict[str, list[dict[str, Any]]]:
    """Philox words, directions of both kinds, perturbed values, updates and packed loss differences."""
    ranges = [(d, d.first, start) for d in RUNS for start in (0, 1_000_003)]
    return {
        "philox": [_philox(counter, seed) for counter, seed in COUNTERS],
        "directions": [_direction(d, k, start, 24) for d, k, start in ranges]
        + [_direction(*plain.where(word), 4) for word in EDGES],
        "perturb": [_perturb(d) for d in RUNS],
        "accumulate": [_accumulate(d, start) for d in RUNS for start in (0, 131)],
        "sgd": [_sgd(1e-2, 0.9, 1e-3), _sgd(0.1, 0.0, 0.0)],
        "adam": [_adam(1e-3, 0.9, 0.99, 1e-8, 0.0, 1), _adam(1e-2, 0.9, 0.999, 1e-5, 5e-4, 10)],
        "quantise": [_quantise(bits, differences) for bits in BITS[:-1] for differences in DIFFERENCES],
    }


def write(worlds: list[dict[str, str]] | None = None) -> None:
    """Write the file, one vector a line; worlds are kept as they are, unless given (`tests.simulate.worlds`)."""
    sections = []
    kept = json.loads(PATH.read_text()).get("worlds", [])
    for name, entries in (make_vectors() | {"worlds": kept if worlds is None else worlds}).items():
        lines = ",\n    ".join(json.dumps(entry) for entry in entries)
        sections.append(f'  "{name}": [\n    {lines}\n  ]')
    PATH.write_text("{\n" + ",\n".join(sections) + "\n}\n")


def parse_directions(entry: dict[str, Any], count: int = 1) -> Directions:
    """The directions that an entry is about."""
    return Directions(
        int(entry["seed"], 16), entry["round"], entry["device"], count, entry.get("first", entry.get("k", 0)),
        entry.get("step", 1), entry["kind"], plain.from_bits(entry["sigma"]) if "sigma" in entry else 0.0,
    )  # fmt: skip


def _bits(numbers: list[float]) -> list[str]:
    return [plain.to_bits(x) for x in numbers]


def _source(d: Directions) -> dict[str, Any]:
    return {"kind": d.kind, "seed": f"{d.seed:016x}", "round": d.round, "device": d.device}


def _numbers(which: int, n: int = 20) -> list[float]:
    """Some numbers to work on."""
    return plain.direction(Directions(1, 0, 0, 1), which, n)


def _philox(counter: tuple[int, int, int, int], seed: int) -> dict[str, Any]:
    words = plain.philox(counter, seed)
    return {"counter": [f"{c:08x}" for c in counter], "seed": f"{seed:016x}", "words": [f"{w:08x}" for w in words]}


def _direction(d: Directions, k: int, start: int, n: int) -> dict[str, Any]:
    return {**_source(d), "k": k, "start": start, "z": _bits(plain.direction(d, k, n, start))}


def _perturb(d: Directions) -> dict[str, Any]:
    values = _numbers(0)
    perturbed = plain.perturb(values, d, d.first)
    return {**_source(d), "k": d.first, "sigma": plain.to_bits(d.sigma), "values": _bits(values),
            "perturbed": _bits(perturbed)}  # fmt: skip


def _accumulate(d: Directions, start: int) -> dict[str, Any]:
    gradient, coefficients = _numbers(1), _numbers(2, d.count)
    result = plain.accumulate(gradient, d, coefficients, start)
    return {**_source(d), "first": d.first, "step": d.step, "start": start, "coefficients": _bits(coefficients),
            "gradient": _bits(gradient), "result": _bits(result)}  # fmt: skip


def _quantise(bits: int, differences: list[float]) -> dict[str, Any]:
    differences = [plain.f32(x) for x in differences]
    seed, round, device = 0x0123456789ABCDEF, 7, 3
    scale, codes = plain.quantise(differences, bits, seed, round, device)
    return {"bits": bits, "seed": f"{seed:016x}", "round": round, "device": device, "differences": _bits(differences),
            "scale": plain.to_bits(scale), "codes": codes.hex()}  # fmt: skip


def _sgd(lr: float, mu: float, decay: float) -> dict[str, Any]:
    values, gradient, momentum = _numbers(0), _numbers(1), _numbers(3) if mu else None
    moved, kept = plain.sgd(values, momentum, gradient, lr, mu, decay)
    return {
        **{name: plain.to_bits(x) for name, x in {"lr": lr, "mu": mu, "decay": decay}.items()},
        "values": _bits(values),
        "gradient": _bits(gradient),
        "momentum": momentum and _bits(momentum),
        "new_values": _bits(moved),
        "new_momentum": kept and _bits(kept),
    }


def _adam(lr: float, beta1: float, beta2: float, eps: float, decay: float, t: int) -> dict[str, Any]:
    constants = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "decay": decay}
    constants |= {"k1": 1 / (1 - beta1**t), "k2": 1 / (1 - beta2**t)}
    values, gradient, m, v = _numbers(0), _numbers(1), _numbers(3), [plain.f32(x * x) for x in _numbers(4)]
    moved, new_m, new_v = plain.adam(values, m, v, gradient, **constants)
    return {
        **{name: plain.to_bits(x) for name, x in constants.items()},
        "values": _bits(values),
        "gradient": _bits(gradient),
        "m": _bits(m),
        "v": _bits(v),
        "new_values": _bits(moved),
        "new_m": _bits(new_m),
        "new_v": _bits(new_v),
    }

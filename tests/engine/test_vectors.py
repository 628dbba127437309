"""Every backend reproduces the published test vectors, `docs/vectors.json`, to the bit."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any

from foreseed.engine.types import Buffer
from tests.engine import plain
from tests.engine.vectors import PATH, make_vectors, parse_directions

if TYPE_CHECKING:  # other interpreters check the vectors without pytest (`tests/test_install.py`)
    from tests.engine.conftest import Backend

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(PATH.read_text())


def numbers(bits: list[str]) -> array[float]:
    return array("f", [plain.from_bits(x) for x in bits])


def bits(numbers: Buffer) -> list[str]:
    return [plain.to_bits(x) for x in memoryview(numbers).tolist()]


def settings(entry: dict[str, Any], *names: str) -> list[float]:
    return [plain.from_bits(entry[name]) for name in names]


def test_the_file_is_what_plain_python_makes() -> None:
    assert make_vectors() == {name: entries for name, entries in VECTORS.items() if name != "worlds"}


def test_philox_words(backend: Backend) -> None:
    for entry in VECTORS["philox"]:
        words = backend.functions.philox([int(c, 16) for c in entry["counter"]], int(entry["seed"], 16))
        assert [f"{int(word):08x}" for word in words] == entry["words"]


def test_directions(backend: Backend) -> None:
    assert {entry["kind"] for entry in VECTORS["directions"]} == {"gaussian", "rademacher"}
    for entry in VECTORS["directions"]:
        z = backend.functions.direction(parse_directions(entry), entry["k"], len(entry["z"]), entry["start"])
        assert bits(z) == entry["z"]


def test_perturbed_values(backend: Backend) -> None:
    for entry in VECTORS["perturb"]:
        perturbed = backend.functions.perturb(numbers(entry["values"]), parse_directions(entry), entry["k"])
        assert bits(perturbed) == entry["perturbed"]


def test_gradient_estimates(backend: Backend) -> None:
    for entry in VECTORS["accumulate"]:
        gradient, coefficients = numbers(entry["gradient"]), numbers(entry["coefficients"])
        directions = parse_directions(entry, len(coefficients))
        backend.functions.accumulate(gradient, directions, coefficients, entry["start"])
        assert bits(gradient) == entry["result"]


def test_sgd_steps(backend: Backend) -> None:
    for entry in VECTORS["sgd"]:
        values, gradient = numbers(entry["values"]), numbers(entry["gradient"])
        momentum = numbers(entry["momentum"]) if entry["momentum"] else None
        backend.functions.sgd(values, momentum, gradient, *settings(entry, "lr", "mu", "decay"))
        assert bits(values) == entry["new_values"]
        assert (momentum and bits(momentum)) == entry["new_momentum"]


def test_adam_steps(backend: Backend) -> None:
    for entry in VECTORS["adam"]:
        values, gradient, m, v = (numbers(entry[name]) for name in ("values", "gradient", "m", "v"))
        constants = settings(entry, "lr", "beta1", "beta2", "eps", "decay", "k1", "k2")
        backend.functions.adam(values, m, v, gradient, *constants)
        assert [bits(values), bits(m), bits(v)] == [entry["new_values"], entry["new_m"], entry["new_v"]]


def test_packed_loss_differences(backend: Backend) -> None:
    assert {entry["bits"] for entry in VECTORS["quantise"]} == {1, 2, 4, 8}
    for entry in VECTORS["quantise"]:
        differences, seed = numbers(entry["differences"]), int(entry["seed"], 16)
        scale, codes = backend.functions.quantise(differences, entry["bits"], seed, entry["round"], entry["device"])
        assert (plain.to_bits(scale), bytes(codes).hex()) == (entry["scale"], entry["codes"])

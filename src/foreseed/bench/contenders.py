"""The contenders: foreseed's engine, and what one would do today with PyTorch or ONNX Runtime.

All do the same work: perturb all living parameters, then add up the loss of the same images. Every setting of a
contender is a `Setup`; the benchmark takes the one that is best for it. Images enter the others as float32 that were
prepared once, outside the timing; foreseed reads the bytes of a device's shard every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import count, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from foreseed.bench.cases import Case
from foreseed.bench.measure import Setup, in_threads
from foreseed.engine.native import NativeEngine
from foreseed.engine.types import Directions

SIGMA = 1e-4
_BATCHES = (16, 64, 256)

Contender = Callable[[Case, Sequence[int]], Iterator[Setup] | None]
"""Makes its ways to run a case on these cores, one after another, or gives None where it is not installed."""


def foreseed(case: Case, cores: Sequence[int]) -> Iterator[Setup]:
    """The C engine, with as many directions side by side as suit a small second cache, and with twice as many.

    With several cores a thread each, since the engine lets go of Python's lock.
    """
    for directions in (case.spec.directions, 2 * case.spec.directions):
        make = partial(_foreseed, case, directions)
        yield make() if len(cores) == 1 else in_threads(make, cores)


def torch_loop(case: Case, cores: Sequence[int]) -> Iterator[Setup]:
    """PyTorch, one perturbed copy of the model after another."""
    layouts = (torch.contiguous_format, torch.channels_last)
    settings = product(_batches(case), layouts)
    return _on_cores([partial(_torch_loop, case, batch, layout) for batch, layout in settings], cores)


def torch_vmap(case: Case, cores: Sequence[int]) -> Iterator[Setup]:
    """PyTorch, several perturbed copies at once by `torch.func.vmap`."""
    settings = dict.fromkeys((min(batch, case.samples.count), n) for batch, n in ((32, 4), (128, 8)))
    return _on_cores([partial(_torch_vmap, case, batch, n) for batch, n in settings], cores)


def onnxruntime(case: Case, cores: Sequence[int]) -> Iterator[Setup] | None:
    """ONNX Runtime, with the weights as inputs of one session or a new session for every perturbed copy."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return None
    settings = product((True, False), _batches(case))
    return _on_cores([partial(_onnxruntime, case, as_inputs, batch) for as_inputs, batch in settings], cores)


CONTENDERS: dict[str, Contender] = {
    "foreseed": foreseed,
    "torch_loop": torch_loop,
    "torch_vmap": torch_vmap,
    "onnxruntime": onnxruntime,
}


def first_direction() -> Directions:
    """The direction that shows whether all contenders compute the same loss."""
    return Directions(seed=1, round=0, device=0, count=1, sigma=SIGMA)


def _on_cores(makes: Sequence[Callable[[int], Setup]], cores: Sequence[int]) -> Iterator[Setup]:
    """Each setting with its library's own threads and, on several cores, also as independent copies."""
    for make in makes:
        yield make(len(cores))
        if len(cores) > 1:
            yield in_threads(partial(make, 1), cores)


def _batches(case: Case) -> list[int]:
    return sorted({min(size, case.samples.count) for size in _BATCHES})


def _foreseed(case: Case, directions: int) -> Setup:
    engine = NativeEngine(case.program, case.spec.batch, directions)
    rounds = count(1)

    def run(units: int) -> None:
        engine.probe(case.values, case.samples, Directions(1, next(rounds), 0, units, sigma=SIGMA))

    settings = f"batch {case.spec.batch}, {directions} directions"
    return Setup(settings, run, directions, lambda _: engine.probe(case.values, case.samples, first_direction())[0])


class _Perturbations:
    """Perturbed copies of all parameters as a PyTorch user makes them: dense noise, masked."""

    def __init__(self, case: Case) -> None:
        self._base, self._step = case.dense(case.values), SIGMA * case.dense_mask()

    def draw(self, *shape: int) -> Tensor:
        return torch.addcmul(self._base, torch.randn(*shape, len(self._base)), self._step)


def _parameters(flat: Tensor, model: nn.Module) -> dict[str, Tensor]:
    named = list(model.named_parameters())
    pieces = torch.split_with_sizes(flat, [parameter.numel() for _, parameter in named])
    return {name: piece.view(p.shape) for (name, p), piece in zip(named, pieces, strict=True)}


def _torch_loop(case: Case, batch: int, layout: torch.memory_format, threads: int) -> Setup:
    # A model of its own: functional_call swaps parameters in place, so threads must not share one.
    model, perturbations = deepcopy(case.model), _Perturbations(case)
    batches = _pairs(case.images.contiguous(memory_format=layout), case.labels, batch)

    def loss(weights: Tensor) -> float:
        parameters = _parameters(weights, model)
        total = torch.zeros(())
        for images, labels in batches:
            total += cross_entropy(functional_call(model, parameters, (images,)), labels, reduction="sum")
        return total.item()

    def run(units: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            for _ in range(units):
                loss(perturbations.draw())

    settings = f"batch {batch}{', channels last' if layout is torch.channels_last else ''}"
    return Setup(settings, run, loss=torch.inference_mode()(loss))


def _torch_vmap(case: Case, batch: int, together: int, threads: int) -> Setup:
    model, perturbations = deepcopy(case.model), _Perturbations(case)
    batches = _pairs(case.images, case.labels, batch)

    def one(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(model, _parameters(weights, model), (images,))
        return cross_entropy(logits, labels, reduction="sum")

    many = vmap(one, in_dims=(0, None, None))

    def losses(weights: Tensor) -> Tensor:
        total = torch.zeros(len(weights))
        for images, labels in batches:
            total += many(weights, images, labels)
        return total

    def run(units: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            for _ in range(units // together):
                losses(perturbations.draw(together)).tolist()

    def loss(weights: Tensor) -> float:
        with torch.inference_mode():
            return losses(weights[None]).item()

    return Setup(f"batch {batch}, {together} together", run, together, loss)


def _onnxruntime(case: Case, as_inputs: bool, batch: int, threads: int) -> Setup:
    from foreseed.bench.onnx_graph import IMAGES, onnx_model

    model, perturbations = deepcopy(case.model), _Perturbations(case)
    batches = [(x.numpy(), y.numpy()) for x, y in _pairs(case.images, case.labels, batch)]
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    proto = onnx_model(case.program, arrays, as_inputs)
    shared = _session(proto, threads) if as_inputs else None

    def loss(weights: Tensor) -> float:
        parameters = {name: p.numpy() for name, p in _parameters(weights, model).items()}
        if shared is None:
            for constant in proto.graph.initializer:
                constant.raw_data = parameters[constant.name].tobytes()
        session, feed = (_session(proto, threads), {}) if shared is None else (shared, parameters)
        total = 0.0
        for images, labels in batches:
            (log_probabilities,) = session.run(None, {IMAGES: images, **feed})
            total -= float(log_probabilities[range(len(labels)), labels].sum())
        return total

    def run(units: int) -> None:
        for _ in range(units):
            loss(perturbations.draw())

    return Setup(f"batch {batch}, {'weights as inputs' if as_inputs else 'a session each'}", run, loss=loss)


def _session(proto: Any, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _pairs(images: Tensor, labels: Tensor, batch: int) -> list[tuple[Tensor, Tensor]]:
    return [(images[i : i + batch], labels[i : i + batch]) for i in range(0, len(labels), batch)]

"""What the ops of a program are: one table, which every reader of a program asks.

An op has up to three parts, in this order: what its kind does, its activation, its pool. `KINDS`, `ACTS` and `POOLS`
hold an entry for each. Shapes and counts, the rules of the format, NumPy, torch, ONNX and the memory of backpropagation
all go over a program with `walker` and ask the entries; so a new layer is one entry here, beside its C kernel and its
function in `reference_layers` (`docs/extend/layer.md`).

Standard library only: entries are handed the torch functions and the ONNX graph that they speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple, TypeVar

from foreseed.engine.errors import ProgramError
from foreseed.engine.ops import DENSE, LARGEST, Act, Kind, Op, Pool, Shape, Window

_Key = TypeVar("_Key", bound=IntEnum)
_FLOAT, _INT64 = 4, 8


class Saved(NamedTuple):
    """What torch's autograd saves of a part in the forward pass; the model's own tensors do not count."""

    input: bool = False
    output: bool = False
    image_bytes: int = 0
    """Beside these, for each image."""
    batch_bytes: int = 0
    """Beside these, whatever the batch."""


@dataclass(frozen=True)
class Part:
    """An entry; what it leaves out is nothing: no parameters, no rules, a tensor of the shape that it reads."""

    reference: str = ""
    """Its function in `foreseed.engine.reference_layers`; "" if it passes on what it reads."""
    torch: Callable[[Any, Op, Sequence[Any], Sequence[Any]], Any] = lambda f, op, x, own: x[0]
    """The same by `torch.nn.functional`, of the tensors that it reads and its dense parameters."""
    onnx: Callable[[Any, Op, Sequence[str], Sequence[str]], str] = lambda graph, op, x, own: x[0]
    """The same added to a `foreseed.trained.onnx_graph.Graph`, of the names of such tensors and of its statistics."""
    shape: Callable[[Op, Shape], Shape] = lambda op, shape: shape
    """The shape of what it makes of a tensor of this shape; ValueError if it cannot."""
    saved: Callable[[Op, Shape, Shape], Saved] = lambda op, shape, made: Saved()
    """What backpropagation saves where parameters matter, given the shapes of what it reads and makes."""
    reference_bytes: Callable[[Op, Shape, Shape], int] = lambda op, shape, made: 0
    """The temporaries of the reference's function for one image, if they are many."""
    # Of kinds only:
    fields: frozenset[str] = frozenset()
    """The fields of an op that it uses, beside `kind` and `a`."""
    n_inputs: int = 1
    """How many tensors it reads."""
    prunable: bool = False
    """Whether its parameter `weight` may be sparse."""
    parameters: Callable[[Op, Shape], dict[str, tuple[int, ...]]] = lambda op, shape: {}
    """Its values in their order: a torch module's names for them, and their dense shapes."""
    statistics: Callable[[Op, Shape], dict[str, tuple[int, ...]]] = lambda op, shape: {}
    """Its statistics, likewise."""
    macs: Callable[[Op, int, Shape], int] = lambda op, n_weights, made: 0
    """Multiply-accumulates of so many weights for one image."""
    rules: Callable[[Op, Sequence[Shape]], list[tuple[bool, str]]] = lambda op, shapes: []
    """Whether it keeps each rule of `docs/format.md`, and what is wrong otherwise."""


def padded(shape: Shape, window: Window) -> Shape:
    """A map with the padding of a window around it."""
    return shape[0], shape[1] + 2 * window[4], shape[2] + 2 * window[5]


def _slide(shape: Shape, window: Window) -> tuple[int, int]:
    """Height and width of what a window makes as it slides over a map."""
    kh, kw, sh, sw, ph, pw = window
    _, h, w = padded(shape, window)
    if min(kh, kw, sh, sw) < 1 or h < kh or w < kw:
        given = f"a kernel {kh}x{kw}, stride {sh}x{sw} and padding {ph}x{pw}"
        raise ValueError(f"{given}, which does not fit its map of {shape[1]}x{shape[2]}")
    return (h - kh) // sh + 1, (w - kw) // sw + 1


def _for_torch(window: Window) -> dict[str, tuple[int, ...]]:
    return {"stride": window[2:4], "padding": window[4:]}


def _for_onnx(window: Window) -> dict[str, Sequence[int]]:
    return {"kernel_shape": window[:2], "strides": window[2:4], "pads": window[4:] * 2}


# --- conv: kernels that slide over a map; a linear layer is one whose kernel is the map ---


def _conv_parameters(op: Op, shape: Shape) -> dict[str, tuple[int, ...]]:
    weight = (op.channels, shape[0] // max(op.groups, 1), *op.window[:2])
    return {"weight": weight, "bias": (op.channels,)} if op.has_parameters else {"weight": weight}


def _conv_rules(op: Op, shapes: Sequence[Shape]) -> list[tuple[bool, str]]:
    c, groups, size = shapes[0][0], op.groups, prod(padded(shapes[0], op.window))
    n_dense = prod(_conv_parameters(op, shapes[0])["weight"])
    divides = groups >= 1 and c % groups == 0 and op.channels % groups == 0
    live = op.n_weights == n_dense if op.rice == DENSE else op.n_weights <= n_dense
    return [
        (op.channels >= 1, "no output channels"),
        (divides, f"{groups} groups of {c} and {op.channels} channels: expected a divisor of both"),
        (size <= LARGEST, f"its input with the padding has {size} numbers: expected at most {LARGEST}"),
        (n_dense <= LARGEST, f"{n_dense} weights: expected at most {LARGEST}"),
        (op.rice <= 15 or op.rice == DENSE, f"Rice parameter {op.rice}: expected 0 to 15, or {DENSE}"),
        (live, f"{op.n_weights} live weights of {n_dense}"),
    ]


def _conv_reference_bytes(op: Op, shape: Shape, made: Shape) -> int:
    columns = prod(made[1:]) * (shape[0] // op.groups) * op.window[0] * op.window[1]
    return 8 * (prod(padded(shape, op.window)) + max(prod(shape), columns)) + 20 * prod(made)  # float64 inside


def _conv_torch(f: Any, op: Op, x: Sequence[Any], own: Sequence[Any]) -> Any:
    if x[0].shape[2:] == op.window[:2] and op.window[4:] == (0, 0) and op.groups == 1:
        return f.linear(x[0].flatten(1), own[0].flatten(1), *own[1:])[..., None, None]
    return f.conv2d(x[0], *own, **_for_torch(op.window), groups=op.groups)


def _conv_onnx(graph: Any, op: Op, x: Sequence[str], own: Sequence[str]) -> Any:
    if graph.is_flat(own[0]):
        return graph.add("Gemm", [graph.flatten(x[0]), *own], transB=1)
    return graph.add("Conv", [x[0], *own], **_for_onnx(op.window), group=op.groups)


_CONV = Part(
    reference="conv",
    torch=_conv_torch,
    onnx=_conv_onnx,
    shape=lambda op, shape: (op.channels, *_slide(shape, op.window)),
    saved=lambda op, shape, made: Saved(input=True),
    reference_bytes=_conv_reference_bytes,
    fields=frozenset({"act", "flags", "rice", "channels", "groups", "window", "pool", "pool_window", "n_weights"}),
    prunable=True,
    parameters=_conv_parameters,
    macs=lambda op, n_weights, made: n_weights * made[1] * made[2],
    rules=_conv_rules,
)


# --- norm: by groups of channels in each image, or by channels over the batch ---


def _norm_torch(f: Any, op: Op, x: Sequence[Any], own: Sequence[Any]) -> Any:
    if op.groups:
        return f.group_norm(x[0], op.groups, *own, eps=op.eps)
    return f.batch_norm(x[0], None, None, *own, training=True, eps=op.eps)


def _norm_onnx(graph: Any, op: Op, x: Sequence[str], own: Sequence[str]) -> Any:
    # ONNX knows norms with a scale and a shift alone.
    affine = [] if op.has_parameters else [graph.constant([number] * graph.channels) for number in (1.0, 0.0)]
    if op.groups:
        return graph.add("GroupNormalization", [x[0], *affine, *own], num_groups=op.groups, epsilon=op.eps)
    return graph.add("BatchNormalization", [x[0], *affine, *own], epsilon=op.eps)


_NORM = Part(
    reference="norm",
    torch=_norm_torch,
    onnx=_norm_onnx,
    # With the input the mean and the inverse deviation: of each group and image, or of each channel.
    saved=lambda op, shape, made: Saved(
        input=True, image_bytes=2 * _FLOAT * op.groups, batch_bytes=0 if op.groups else 2 * _FLOAT * shape[0]
    ),
    fields=frozenset({"act", "flags", "groups", "eps"}),
    parameters=lambda op, shape: {"weight": shape[:1], "bias": shape[:1]} if op.has_parameters else {},
    statistics=lambda op, shape: {} if op.groups else {"running_mean": shape[:1], "running_var": shape[:1]},
    rules=lambda op, shapes: [
        (0 < op.eps < inf, f"eps {op.eps}: expected a positive number"),
        (not op.groups or shapes[0][0] % op.groups == 0, f"{op.groups} groups of {shapes[0][0]} channels"),
    ],
)

_ADD = Part(
    reference="add",
    torch=lambda f, op, x, own: x[0] + x[1],
    onnx=lambda graph, op, x, own: graph.add("Add", x),
    fields=frozenset({"act", "b"}),
    n_inputs=2,
    rules=lambda op, shapes: [(shapes[0] == shapes[1], f"it adds {shapes[0]} and {shapes[1]}: expected equal shapes")],
)


# --- activations and pools ---


def _activation(name: str, onnx: str, saved: Saved, **attributes: Any) -> Part:
    """A function of each number: its name in NumPy and torch, its node in ONNX."""
    return Part(
        reference=name,
        torch=lambda f, op, x, own: getattr(f, name)(x[0]),
        onnx=lambda graph, op, x, own: graph.add(onnx, x, **attributes),
        saved=lambda op, shape, made: saved,
    )


def _pool(name: str, torch: str, onnx: str, saved: Callable[[Op, Shape, Shape], Saved], **count: bool) -> Part:
    """A window reduced to a number: its function in NumPy and in torch, its node in ONNX."""
    return Part(
        reference=name,
        torch=lambda f, op, x, own: getattr(f, torch)(x[0], op.pool_window[:2], **_for_torch(op.pool_window), **count),
        onnx=lambda graph, op, x, own: graph.add(onnx, x, **_for_onnx(op.pool_window), **count),
        shape=lambda op, shape: (shape[0], *_slide(shape, op.pool_window)),
        saved=saved,
    )


def _max_saved(op: Op, shape: Shape, made: Shape) -> Saved:
    return Saved(input=True, image_bytes=_INT64 * prod(made))  # where each maximum was


def _average_saved(op: Op, shape: Shape, made: Shape) -> Saved:
    return Saved(input=prod(op.pool_window[:2]) != prod(shape[1:]))  # a mean of the whole map saves nothing


class Table(dict[_Key, Part]):
    """Entries by their numbers in the format; one that is missing is never taken for another."""

    def __missing__(self, key: _Key) -> Part:
        raise ProgramError(f"{key!r} has no entry in the table of foreseed.engine.parts; add one, or upgrade foreseed")


KINDS: Table[Kind] = Table(
    {
        Kind.CONV: _CONV,
        Kind.POOL: Part(
            fields=frozenset({"pool", "pool_window"}),
            rules=lambda op, shapes: [(op.pool is not Pool.NONE, "it says how to pool nowhere")],
        ),
        Kind.NORM: _NORM,
        Kind.ADD: _ADD,
        Kind.ACT: Part(fields=frozenset({"act"})),
    }
)
ACTS: Table[Act] = Table(
    {
        Act.NONE: Part(),
        # A ReLU after a max pool counts as before it: the program says no more.
        Act.RELU: _activation("relu", "Relu", Saved(output=True)),
        Act.HARDSWISH: _activation("hardswish", "HardSwish", Saved(input=True)),
    }
)
_average = partial(_pool, "average_pool", "avg_pool2d", "AveragePool", _average_saved)
POOLS: Table[Pool] = Table(
    {
        Pool.NONE: Part(),
        Pool.MAX: _pool("max_pool", "max_pool2d", "MaxPool", _max_saved),
        Pool.AVERAGE: _average(count_include_pad=True),
        Pool.AVERAGE_INSIDE: _average(count_include_pad=False),
    }
)

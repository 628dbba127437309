"""What the ops of a program are: one table, which every reader of a program asks.

An op has up to three parts, in this order: what its kind does, its activation, its pool. `KINDS`, `ACTS` and `POOLS`
hold an entry for each. Shapes and counts, the rules of the format, NumPy, torch, ONNX and the memory of backpropagation
all go over a program with `walker` and ask the entries; so a new layer is one entry here, beside its C kernel and its
function in `reference_layers` (`docs/extend/layer.md`).

Standard library only: entries are handed the torch functions and the ONNX graph that they speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple, TypeVar

from foreseed.engine.errors import ProgramError
from foreseed.engine.ops import CEIL, DENSE, LARGEST, PARAMETERS, SHARED, Act, Kind, Op, Pool, Shape, Window

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
    shape: Callable[..., Shape] = lambda op, shape, *others: shape
    """The shape of what it makes of tensors of these shapes; ValueError if it cannot."""
    saved: Callable[[Op, Shape, Shape], Saved] = lambda op, shape, made: Saved()
    """What backpropagation saves where parameters matter, given the shapes of what it reads and makes."""
    reference_bytes: Callable[[Op, Shape, Shape], int] = lambda op, shape, made: 0
    """The temporaries of the reference's function for one image, if they are many."""
    # Of kinds only:
    fields: frozenset[str] = frozenset()
    """The fields of an op that it uses, beside `kind` and `a`."""
    flags: int = 0
    """The flags that an op may have."""
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


def reach(op: Op) -> tuple[int, int]:
    """Rows and columns that the kernel of a conv spans."""
    rows, columns = ((k - 1) * d + 1 for k, d in zip(op.window, op.dilation, strict=False))
    return rows, columns


def _slide(shape: Shape, window: Window, ceil: int = 0) -> tuple[int, int]:
    """Height and width of what a window makes as it slides over a map."""
    kh, kw, sh, sw, ph, pw = window
    _, h, w = padded(shape, window)
    if min(kh, kw, sh, sw) < 1 or h < kh or w < kw:
        given = f"a kernel {kh}x{kw}, stride {sh}x{sw} and padding {ph}x{pw}"
        raise ValueError(f"{given}, which does not fit its map of {shape[1]}x{shape[2]}")
    rows, columns = (h - kh) // sh + 1, (w - kw) // sw + 1
    if ceil:  # once more, if that window begins before the end of what is not padding
        rows += bool((h - kh) % sh) and rows * sh < shape[1] + ph
        columns += bool((w - kw) % sw) and columns * sw < shape[2] + pw
    return rows, columns


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
    own = op.owner is None  # otherwise its weights are checked where they stand
    live = op.n_weights == n_dense if own and op.rice == DENSE else op.n_weights <= n_dense
    return [
        (op.channels >= 1, "no output channels"),
        (divides, f"{groups} groups of {c} and {op.channels} channels: expected a divisor of both"),
        (size <= LARGEST, f"its input with the padding has {size} numbers: expected at most {LARGEST}"),
        (n_dense <= LARGEST, f"{n_dense} weights: expected at most {LARGEST}"),
        (not own or op.rice <= 15 or op.rice == DENSE, f"Rice parameter {op.rice}: expected 0 to 15, or {DENSE}"),
        (live, f"{op.n_weights} live weights of {n_dense}"),
    ]


def _conv_reference_bytes(op: Op, shape: Shape, made: Shape) -> int:
    columns = prod(made[1:]) * (shape[0] // op.groups) * op.window[0] * op.window[1]
    return 8 * (prod(padded(shape, op.window)) + max(prod(shape), columns)) + 20 * prod(made)  # float64 inside


def _conv_torch(f: Any, op: Op, x: Sequence[Any], own: Sequence[Any]) -> Any:
    if x[0].shape[2:] == op.window[:2] and op.window[4:] == (0, 0) and op.groups == 1:
        return f.linear(x[0].flatten(1), own[0].flatten(1), *own[1:])[..., None, None]
    return f.conv2d(x[0], *own, **_for_torch(op.window), dilation=op.dilation, groups=op.groups)


def _conv_onnx(graph: Any, op: Op, x: Sequence[str], own: Sequence[str]) -> Any:
    if graph.is_flat(own[0]):
        return graph.add("Gemm", [graph.flatten(x[0]), *own], transB=1)
    return graph.add("Conv", [x[0], *own], **_for_onnx(op.window), dilations=op.dilation, group=op.groups)


def _conv_shape(op: Op, shape: Shape) -> Shape:
    if min(op.window[:2]) < 1:
        return op.channels, *_slide(shape, op.window)
    return op.channels, *_slide(shape, (*reach(op), *op.window[2:]))


_CONV = Part(
    reference="conv",
    torch=_conv_torch,
    onnx=_conv_onnx,
    shape=_conv_shape,
    saved=lambda op, shape, made: Saved(input=True),
    reference_bytes=_conv_reference_bytes,
    fields=frozenset(
        {
            "act",
            "slope",
            "flags",
            "rice",
            "channels",
            "groups",
            "window",
            "dilation",
            "pool",
            "pool_window",
            "n_weights",
        }
    ),
    flags=PARAMETERS | SHARED | CEIL,
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
    fields=frozenset({"act", "flags", "rice", "groups", "eps"}),
    flags=PARAMETERS | SHARED,
    parameters=lambda op, shape: {"weight": shape[:1], "bias": shape[:1]} if op.has_parameters else {},
    statistics=lambda op, shape: {} if op.groups else {"running_mean": shape[:1], "running_var": shape[:1]},
    rules=lambda op, shapes: [
        (0 < op.eps < inf, f"eps {op.eps}: expected a positive number"),
        (not op.groups or shapes[0][0] % op.groups == 0, f"{op.groups} groups of {shapes[0][0]} channels"),
        (op.owner is not None or not op.rice, f"Rice parameter {op.rice}: expected 0"),
        (op.owner is None or bool(op.groups and op.has_parameters), "it shares values that such a norm does not have"),
        (op.act is not Act.LEAKY_RELU, "a LeakyReLU: its slope has no place in a norm"),
    ],
)

_ADD = Part(
    reference="add",
    torch=lambda f, op, x, own: x[0] + x[1],
    onnx=lambda graph, op, x, own: graph.add("Add", x),
    fields=frozenset({"act", "slope", "b"}),
    n_inputs=2,
    rules=lambda op, shapes: [(shapes[0] == shapes[1], f"it adds {shapes[0]} and {shapes[1]}: expected equal shapes")],
)


def _mul_rules(op: Op, shapes: Sequence[Shape]) -> list[tuple[bool, str]]:
    a, b = shapes
    fits = b in (a, (a[0], 1, 1))
    return [(fits, f"it multiplies {a} and {b}: expected equal shapes, or one number for each channel")]


_MUL = Part(
    reference="mul",
    torch=lambda f, op, x, own: x[0] * x[1],
    onnx=lambda graph, op, x, own: graph.add("Mul", graph.alike(x)),
    saved=lambda op, shape, made: Saved(input=True),
    fields=frozenset({"act", "slope", "b"}),
    n_inputs=2,
    rules=_mul_rules,
)


# --- cat and pad: numbers that move as they are ---


_CAT = Part(
    reference="cat",
    torch=lambda f, op, x, own: f.torch.cat(x, 1),
    onnx=lambda graph, op, x, own: graph.add("Concat", graph.alike(x), axis=1),
    shape=lambda op, shape, other: (shape[0] + other[0], *shape[1:]),
    fields=frozenset({"b"}),
    n_inputs=2,
    rules=lambda op, shapes: [
        (shapes[0][1:] == shapes[1][1:], f"it joins {shapes[0]} and {shapes[1]}: expected one map size")
    ],
)


def _pad_onnx(graph: Any, op: Op, x: Sequence[str], own: Sequence[str]) -> Any:
    top, left, bottom, right = op.window[:4]
    return graph.add("Pad", [*x, graph.constant([0, 0, top, left, 0, 0, bottom, right])])


_PAD = Part(
    reference="pad",
    torch=lambda f, op, x, own: f.pad(x[0], (op.window[1], op.window[3], op.window[0], op.window[2])),
    onnx=_pad_onnx,
    shape=lambda op, shape: (
        shape[0], shape[1] + op.window[0] + op.window[2], shape[2] + op.window[1] + op.window[3]
    ),
    fields=frozenset({"window"}),
    rules=lambda op, shapes: [(op.window[4:] == (0, 0), f"window {op.window}: expected 0 in the last two places")],
)  # fmt: skip


# --- activations and pools ---


_SMOOTH_BYTES = 48
"""The reference's temporaries for each number of an activation with an exponential in it."""


def _activation(name: str, onnx: str, saved: Saved, reference_bytes: int = 0, **attributes: Any) -> Part:
    """A function of each number: its name in NumPy and torch, its node in ONNX."""
    return Part(
        reference=name,
        torch=lambda f, op, x, own: getattr(f, name)(x[0]),
        onnx=lambda graph, op, x, own: graph.add(onnx, x, **attributes),
        saved=lambda op, shape, made: saved,
        reference_bytes=lambda op, shape, made: reference_bytes * prod(made),
    )


def _pool(name: str, torch: str, onnx: str, saved: Callable[[Op, Shape, Shape], Saved], **count: bool) -> Part:
    """A window reduced to a number: its function in NumPy and in torch, its node in ONNX."""

    def options(op: Op) -> dict[str, bool]:
        return {"ceil_mode": bool(op.flags & CEIL), **count}

    return Part(
        reference=name,
        torch=lambda f, op, x, own: getattr(f, torch)(
            x[0], op.pool_window[:2], **_for_torch(op.pool_window), **options(op)
        ),
        onnx=lambda graph, op, x, own: graph.add(onnx, x, **_for_onnx(op.pool_window), **options(op)),
        shape=lambda op, shape: (shape[0], *_slide(shape, op.pool_window, op.flags & CEIL)),
        saved=saved,
    )


def _adaptive_shape(op: Op, shape: Shape) -> Shape:
    rows, columns = op.pool_window[:2]
    if min(rows, columns) < 1 or shape[1] // rows + 2 > 255:
        raise ValueError(
            f"an adaptive pool of {shape[1]}x{shape[2]} to {rows}x{columns}: expected windows below 254 rows"
        )
    return shape[0], rows, columns


def _adaptive_onnx(graph: Any, op: Op, x: Sequence[str], own: Sequence[str]) -> Any:
    raise ProgramError("ONNX has no node for an adaptive pool whose windows differ; use AvgPool2d")


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
            fields=frozenset({"pool", "pool_window", "flags"}),
            flags=CEIL,
            rules=lambda op, shapes: [(op.pool is not Pool.NONE, "it says how to pool nowhere")],
        ),
        Kind.NORM: _NORM,
        Kind.ADD: _ADD,
        Kind.ACT: Part(fields=frozenset({"act", "slope"})),
        Kind.MUL: _MUL,
        Kind.CAT: _CAT,
        Kind.PAD: _PAD,
    }
)
ACTS: Table[Act] = Table(
    {
        Act.NONE: Part(),
        # A ReLU after a max pool counts as before it: the program says no more.
        Act.RELU: _activation("relu", "Relu", Saved(output=True)),
        Act.HARDSWISH: _activation("hardswish", "HardSwish", Saved(input=True)),
        Act.RELU6: replace(
            _activation("relu6", "", Saved(input=True)),
            onnx=lambda graph, op, x, own: graph.add("Clip", [*x, graph.constant(0.0), graph.constant(6.0)]),
        ),
        Act.LEAKY_RELU: replace(
            _activation("leaky_relu", "", Saved(input=True)),
            torch=lambda f, op, x, own: f.leaky_relu(x[0], op.slope),
            onnx=lambda graph, op, x, own: graph.add("LeakyRelu", x, alpha=op.slope),
        ),
        Act.HARDSIGMOID: _activation("hardsigmoid", "HardSigmoid", Saved(input=True), alpha=1 / 6),
        Act.SIGMOID: _activation("sigmoid", "Sigmoid", Saved(output=True), _SMOOTH_BYTES),
        Act.SILU: replace(
            _activation("silu", "", Saved(input=True), _SMOOTH_BYTES),
            onnx=lambda graph, op, x, own: graph.add("Mul", [x[0], graph.add("Sigmoid", x)]),
        ),
        Act.TANH: _activation("tanh", "Tanh", Saved(output=True), _SMOOTH_BYTES),
        Act.GELU: _activation("gelu", "Gelu", Saved(input=True), _SMOOTH_BYTES),
        Act.GELU_TANH: replace(
            _activation("gelu_tanh", "Gelu", Saved(input=True), _SMOOTH_BYTES, approximate="tanh"),
            torch=lambda f, op, x, own: f.gelu(x[0], approximate="tanh"),
        ),
    }
)
_average = partial(_pool, "average_pool", "avg_pool2d", "AveragePool", _average_saved)
POOLS: Table[Pool] = Table(
    {
        Pool.NONE: Part(),
        Pool.MAX: _pool("max_pool", "max_pool2d", "MaxPool", _max_saved),
        Pool.AVERAGE: _average(count_include_pad=True),
        Pool.AVERAGE_INSIDE: _average(count_include_pad=False),
        Pool.ADAPTIVE: Part(
            reference="adaptive_pool",
            torch=lambda f, op, x, own: f.adaptive_avg_pool2d(x[0], op.pool_window[:2]),
            onnx=_adaptive_onnx,
            shape=_adaptive_shape,
            saved=lambda op, shape, made: Saved(input=True),
        ),
    }
)

"""Random valid programs with values and images for them, and what torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from foreseed.engine.ops import CEIL, SHARED
from foreseed.engine.program import Act, Kind, Op, Pool, Program, assemble
from foreseed.engine.types import Directions, Samples
from foreseed.engine.walker import place, reads

torch.set_num_threads(1)  # tensors this small only wait for other threads

Shape = tuple[int, int, int]
Window = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Case:
    """A program and all that an engine needs to run it."""

    program: Program
    values: np.ndarray
    stats: np.ndarray
    samples: Samples
    images: np.ndarray
    labels: np.ndarray

    def __repr__(self) -> str:
        ops = "\n  ".join(map(repr, self.program.ops))
        return f"Case({self.program.input_shape}, {len(self.images)} images, ops:\n  {ops})"


@st.composite
def programs(draw: st.DrawFn) -> Case:
    """A net of a few layers of every kind, with values of a size that keeps the signal alive."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes: list[Shape] = [(draw(st.integers(1, 4)), draw(st.integers(3, 9)), draw(st.integers(3, 9)))]
    ops: list[Op] = []
    live: list[list[int] | None] = []
    for _ in range(draw(st.integers(0, 6))):
        op = draw(_ops(shapes, ops))
        _append(draw, rng, op, ops, live, shapes)
    classes = draw(st.integers(1, 5))
    _append(draw, rng, draw(_classifiers(shapes, classes)), ops, live, shapes)
    c = shapes[0][0]
    program = assemble(shapes[0], classes, rng.normal(0, 1 / 64, c), rng.normal(0, 1, c), ops, live)
    count = draw(st.integers(1, 7))
    images = rng.integers(0, 256, (count, *shapes[0]), np.uint8)
    labels = rng.integers(0, classes, count, np.uint8)
    samples = draw(_layouts(images, labels))
    return Case(program, random_values(program, rng), random_stats(program, rng), samples, images, labels)


def directions() -> st.SearchStrategy[Directions]:
    """Up to four directions of any kind, seed, round and device."""
    return st.builds(
        Directions,
        seed=st.integers(0, 2**64 - 1),
        round=st.integers(0, 2**32 - 1),
        device=st.integers(0, 2**32 - 1),
        count=st.integers(1, 4),
        first=st.integers(0, 2**32 - 1000),
        step=st.integers(1, 100),
        kind=st.sampled_from(["gaussian", "rademacher"]),
        sigma=st.floats(0, 1, width=32),
    )


def _append(draw: st.DrawFn, rng: np.random.Generator, op: Op, ops: list, live: list, shapes: list[Shape]) -> None:
    indices = None
    if op.kind is Kind.CONV and op.owner is None:
        indices = _live(draw, rng, (op.channels, shapes[op.a][0] // op.groups, op.window[0], op.window[1]))
    ops.append(op)
    live.append(indices)
    shapes.append(place(op, [shapes[tensor] for tensor in reads(op)]).layer.shape)


def _live(draw: st.DrawFn, rng: np.random.Generator, shape: tuple[int, ...]) -> list[int] | None:
    density = draw(st.sampled_from([None, 0.9, 0.5, 0.2, 0.05]))
    if density is None:
        return None
    alive = rng.random(shape) < density
    if draw(st.booleans()):
        alive[rng.integers(shape[0])] = False
    return np.flatnonzero(alive).tolist()


@st.composite
def _ops(draw: st.DrawFn, shapes: list[Shape], ops: list[Op]) -> Op:
    last = len(shapes) - 1
    a = draw(st.one_of(st.just(last), st.integers(0, last)))
    c, h, w = shapes[a]
    kind, act = draw(st.sampled_from(Kind)), draw(st.sampled_from(Act))
    slope = float(np.float32(draw(st.sampled_from([0.01, 0.2, -0.5, 2.0])))) if act is Act.LEAKY_RELU else 0.0
    owners = [i for i, op in enumerate(ops) if op.kind is kind and op.owner is None and shapes[op.a][0] == c]
    if kind is Kind.CONV:
        owner = draw(st.sampled_from(owners)) if owners and draw(st.booleans()) else None
        return draw(_convs(a, shapes[a], act, slope, owner, ops))
    if kind is Kind.POOL:
        return Op(kind, a, **draw(_pools((h, w), list(Pool)[1:])))
    if kind is Kind.PAD:
        return Op(kind, a, window=(*(draw(st.integers(0, 2)) for _ in range(4)), 0, 0))
    if kind is Kind.NORM:
        act = Act.RELU6 if act is Act.LEAKY_RELU else act
        owners = [i for i in owners if ops[i].groups and ops[i].flags]
        if owners and draw(st.booleans()):
            owner = draw(st.sampled_from(owners))
            return Op(kind, a, act=act, flags=1 | SHARED, rice=owner, groups=ops[owner].groups, eps=1.0)
        groups = draw(st.sampled_from([0, *_divisors(c)]))
        eps = float(np.float32(draw(st.sampled_from([1e-5, 1e-3, 0.1]))))
        return Op(kind, a, act=act, flags=draw(st.integers(0, 1)), groups=groups, eps=eps)
    if kind is Kind.ADD:
        alike = [tensor for tensor, shape in enumerate(shapes) if shape == shapes[a]]
        return Op(kind, a, b=draw(st.sampled_from(alike)), act=act, slope=slope)
    if kind is Kind.MUL:
        fits = [tensor for tensor, shape in enumerate(shapes) if shape in (shapes[a], (c, 1, 1))]
        return Op(kind, a, b=draw(st.sampled_from(fits)), act=act, slope=slope)
    if kind is Kind.CAT:
        return Op(kind, a, b=draw(st.sampled_from([t for t, shape in enumerate(shapes) if shape[1:] == (h, w)])))
    return Op(kind, a, act=act, slope=slope)


@st.composite
def _convs(draw: st.DrawFn, a: int, shape: Shape, act: Act, slope: float, owner: int | None, ops: list[Op]) -> Op:
    c, *size = shape
    padding = [draw(st.integers(0, 2)) for _ in size]
    padded = [n + 2 * p for n, p in zip(size, padding, strict=True)]
    if owner is not None and all(k <= n for k, n in zip(ops[owner].window, padded, strict=False)):
        theirs = ops[owner]
        kernel, groups, channels = theirs.window[:2], theirs.groups, theirs.channels
        flags, rice = theirs.flags & 1 | SHARED, owner
    else:
        groups = draw(st.sampled_from(_divisors(c)))
        kernel = [draw(st.integers(1, min(4, n))) for n in padded]
        channels, rice = groups * draw(st.integers(1, max(1, 8 // groups))), 0
        flags = draw(st.integers(0, 1))
    stride = [draw(st.integers(1, 3)) for _ in size]
    most = [(n - 1) // max(k - 1, 1) for n, k in zip(padded, kernel, strict=True)]
    dilation = tuple(draw(st.integers(1, max(1, min(3, d)))) for d in most)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    pooled = draw(_pools(_slide(tuple(size), (*span, *stride, *padding)), list(Pool)))
    flags |= pooled.pop("flags", 0)
    return Op(Kind.CONV, a, act=act, slope=slope, flags=flags, rice=rice, channels=channels, groups=groups,
              window=(*kernel, *stride, *padding), dilation=dilation, **pooled)  # fmt: skip


@st.composite
def _pools(draw: st.DrawFn, size: tuple[int, int], kinds: list[Pool]) -> dict:
    """The fields of one of these pools, over a map of this size."""
    pool = draw(st.sampled_from(kinds))
    if pool is Pool.NONE:
        return {}
    if pool is Pool.ADAPTIVE:
        return {"pool": pool, "pool_window": (draw(st.integers(1, 5)), draw(st.integers(1, 5)), 0, 0, 0, 0)}
    return {"pool": pool, "pool_window": draw(_pool_windows(size)), "flags": draw(st.sampled_from([0, CEIL]))}


@st.composite
def _pool_windows(draw: st.DrawFn, size: tuple[int, int]) -> Window:
    kernel = [draw(st.integers(1, 4)) for _ in size]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    fits = [n + 2 * p >= k for n, p, k in zip(size, padding, kernel, strict=True)]
    kernel = [k if fit else 1 for k, fit in zip(kernel, fits, strict=True)]
    padding = [p if fit else 0 for p, fit in zip(padding, fits, strict=True)]
    return (*kernel, draw(st.integers(1, 3)), draw(st.integers(1, 3)), *padding)


@st.composite
def _classifiers(draw: st.DrawFn, shapes: list[Shape], classes: int) -> Op:
    """A linear layer, or a 1x1 convolution under global average pooling."""
    a = len(shapes) - 1
    _, h, w = shapes[a]
    flags = draw(st.integers(0, 1))
    if draw(st.booleans()):
        return Op(Kind.CONV, a, flags=flags, channels=classes, groups=1, window=(h, w, 1, 1, 0, 0))
    return Op(Kind.CONV, a, flags=flags, channels=classes, groups=1, window=(1, 1, 1, 1, 0, 0),
              pool=Pool.AVERAGE, pool_window=(h, w, 1, 1, 0, 0))  # fmt: skip


@st.composite
def _layouts(draw: st.DrawFn, images: np.ndarray, labels: np.ndarray) -> Samples:
    """The same samples with the label before or after the pixels, and with gaps between the records."""
    size, gap = images[0].size, draw(st.integers(0, 3))
    image_offset, label_offset = draw(st.sampled_from([(1, 0), (0, size), (2, 0)]))
    stride = max(image_offset + size, label_offset + 1) + gap
    data = np.full((len(images), stride), 255, np.uint8)
    data[:, image_offset : image_offset + size] = images.reshape(len(images), -1)
    data[:, label_offset] = labels
    return Samples(data.tobytes(), len(images), stride, image_offset, label_offset)


def _slide(size: tuple[int, int], window: Window) -> tuple[int, int]:
    kh, kw, sh, sw, ph, pw = window
    return (size[0] + 2 * ph - kh) // sh + 1, (size[1] + 2 * pw - kw) // sw + 1


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def records(images: np.ndarray, labels: np.ndarray) -> Samples:
    """Samples in the layout of a shard."""
    rows = np.concatenate((labels[:, None], images.reshape(len(images), -1)), axis=1)
    return Samples.records(rows.tobytes(), images[0].size)


def random_values(program: Program, rng: np.random.Generator) -> np.ndarray:
    """Weights of variance 1 / (live weights of a row), small biases, gammas around 1 of either sign."""
    parts = [np.empty(0)]
    for op, shape in zip(program.ops, program.shapes()[1:], strict=True):
        if op.owner is not None:
            continue
        if op.kind is Kind.CONV:
            parts.append(rng.normal(0, (op.channels / max(op.n_weights, 1)) ** 0.5, op.n_weights))
            parts.append(rng.normal(0, 0.3, op.channels * op.has_parameters))
        elif op.kind is Kind.NORM and op.has_parameters:
            parts += [rng.normal(1, 0.5, shape[0]), rng.normal(0, 0.3, shape[0])]
    return np.concatenate(parts).astype(np.float32)


def random_stats(program: Program, rng: np.random.Generator) -> np.ndarray:
    parts = [np.empty(0)]
    for op, shape in zip(program.ops, program.shapes()[1:], strict=True):
        if op.kind is Kind.NORM and not op.groups:
            parts += [rng.normal(0, 0.5, shape[0]), rng.uniform(0.2, 2, shape[0])]
    return np.concatenate(parts).astype(np.float32)


def lenet5(live: list[list[int] | None] | None = None, act: Act = Act.RELU) -> Program:
    """The classic LeNet-5 on 3x32x32 images."""
    halve = {"pool": Pool.MAX, "pool_window": (2, 2, 2, 2, 0, 0), "act": act}
    one = {"flags": 1, "groups": 1}
    ops = [
        Op(Kind.CONV, 0, channels=6, window=(5, 5, 1, 1, 0, 0), **one, **halve),
        Op(Kind.CONV, 1, channels=16, window=(5, 5, 1, 1, 0, 0), **one, **halve),
        Op(Kind.CONV, 2, channels=120, window=(5, 5, 1, 1, 0, 0), **one, act=act),
        Op(Kind.CONV, 3, channels=84, window=(1, 1, 1, 1, 0, 0), **one, act=act),
        Op(Kind.CONV, 4, channels=10, window=(1, 1, 1, 1, 0, 0), **one),
    ]
    names = ["conv1", "conv2", "fc1", "fc2", "fc3"]
    return assemble((3, 32, 32), 10, [1 / 64] * 3, [-2.0] * 3, ops, live or [None] * 5, names)


@dataclass(frozen=True)
class Exact:
    """What torch computes in float64, and how far float32 may lawfully be from it."""

    logits: np.ndarray
    logits_error: np.ndarray
    stats: np.ndarray
    stats_error: np.ndarray


# Half a unit in the last place of float32, with a hundredth on top for all products of two roundings.
ULP = 1.01 * 2.0**-24


def torch_logits(program: Program, values: np.ndarray, images: np.ndarray, stats: np.ndarray | None) -> Exact:
    """Run a program with torch in float64, carrying a bound of the error of any float32 engine along.

    Every tensor is a pair (x, e): an engine's float32 numbers lie within e of x, by the standard analysis of
    rounding: n roundings in a row change a sum by at most n * ULP * (the sum of its terms' magnitudes).
    """
    scale, shift = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (program.scale, program.shift))
    scaled = torch.from_numpy(images).double() * scale
    tensors = [(scaled + shift, ULP * (scaled.abs() + (scaled + shift).abs()))]
    live, taken, frozen = dict(program.live()), _Reader(values), None if stats is None else _Reader(stats)
    seen = [torch.empty(2, 0, dtype=torch.float64)]
    values_of: dict[int, torch.Tensor] = {}
    for i, op in enumerate(program.ops):
        x, e = tensors[op.a]
        owner = i if op.owner is None else op.owner
        if owner == i:
            values_of[i] = taken.take(program.layers()[i].n_values)
        own = _Reader(values_of[owner].numpy())
        if op.kind is Kind.CONV:
            x, e = _conv(op, live[owner], own, x, e)
        elif op.kind is Kind.NORM:
            x, e, moments = _norm(op, own, frozen, x, e)
            seen.append(moments)
        elif op.kind is Kind.ADD:
            x, e = x + tensors[op.b][0], e + tensors[op.b][1]
            e = e + ULP * (x.abs() + e)
        elif op.kind is Kind.MUL:
            y, f = tensors[op.b]
            e = x.abs() * f + y.abs() * e + e * f
            x = x * y
            e = e + ULP * (x.abs() + e)
        elif op.kind is Kind.CAT:
            x, e = (torch.cat(pair, 1) for pair in zip((x, e), tensors[op.b], strict=True))
        elif op.kind is Kind.PAD:
            top, left, bottom, right = op.window[:4]
            x, e = (F.pad(t, (left, right, top, bottom)) for t in (x, e))
        tensors.append(_pool(op, *_act(op, x, e)))
    logits, error = (tensor.flatten(1).numpy() for tensor in tensors[-1])
    return Exact(logits, error, *torch.cat(seen, 1).numpy())


class _Reader:
    """Hands out the numbers of a vector in order."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.left = torch.from_numpy(numbers.astype(np.float64))

    def take(self, n: int) -> torch.Tensor:
        taken, self.left = self.left[:n], self.left[n:]
        return taken


def _conv(op: Op, live, taken: _Reader, x: torch.Tensor, e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kh, kw, sh, sw, ph, pw = op.window
    weight = torch.zeros(op.channels, x.shape[1] // op.groups, kh, kw, dtype=torch.float64)
    weight.view(-1)[torch.tensor(list(live), dtype=torch.long)] = taken.take(op.n_weights)
    bias = taken.take(op.channels) if op.has_parameters else torch.zeros(op.channels, dtype=torch.float64)
    how = {"stride": (sh, sw), "padding": (ph, pw), "groups": op.groups, "dilation": op.dilation}
    taps = int((weight != 0).sum((1, 2, 3)).max())
    magnitude = F.conv2d(x.abs() + e, weight.abs(), bias.abs(), **how)
    error = F.conv2d(e, weight.abs(), None, **how) + (taps + 2) * ULP * magnitude
    return F.conv2d(x, weight, bias, **how), error


def _act(op: Op, x: torch.Tensor, e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if op.act is Act.RELU:
        return F.relu(x), e
    if op.act is Act.HARDSWISH:
        return F.hardswish(x), 1.5 * e + 4 * ULP * (x.abs() + e)  # its steepest slope is 1.5, at x = 3
    if op.act is Act.RELU6:
        return F.relu6(x), e
    if op.act is Act.LEAKY_RELU:
        steep = max(1.0, abs(op.slope))
        return F.leaky_relu(x, op.slope), steep * (e + ULP * (x.abs() + e))
    if op.act in _GATES:
        return _GATES[op.act](x), 0.25 * e + 6 * ULP + torch.where(x.abs() < 3, ULP * (x.abs() + e), 0)
    if op.act in _SMOOTH:
        # None is steeper than 1.13 or further from 0 than its argument; a few roundings are relative to that.
        return _SMOOTH[op.act](x), 1.13 * e + 10 * ULP * (x.abs() + e)
    return x, e


_GATES = {Act.SIGMOID: torch.sigmoid, Act.HARDSIGMOID: F.hardsigmoid}
_SMOOTH = {
    Act.SILU: F.silu,
    Act.TANH: torch.tanh,
    Act.GELU: F.gelu,
    Act.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


def _pool(op: Op, x: torch.Tensor, e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kh, kw, sh, sw, ph, pw = op.pool_window
    where = {"kernel_size": (kh, kw), "stride": (sh, sw), "padding": (ph, pw)}
    if op.pool is Pool.NONE:
        return x, e
    if op.pool is Pool.ADAPTIVE:
        longest = (x.shape[2] // kh + 2) * (x.shape[3] // kw + 2)
        roundings = (longest + 2) * ULP * (x.abs() + e)
        return F.adaptive_avg_pool2d(x, (kh, kw)), F.adaptive_avg_pool2d(e + roundings, (kh, kw))
    where["ceil_mode"] = bool(op.flags & CEIL)
    if op.pool is Pool.MAX:
        return F.max_pool2d(x, **where), F.max_pool2d(e, **where)
    where["count_include_pad"] = op.pool is Pool.AVERAGE
    roundings = (kh * kw + 2) * ULP
    return F.avg_pool2d(x, **where), F.avg_pool2d(e + roundings * (x.abs() + e), **where)


def _norm(
    op: Op, taken: _Reader, frozen: _Reader | None, x: torch.Tensor, e: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    c = x.shape[1]
    gamma, beta = (taken.take(c), taken.take(c)) if op.has_parameters else (None, None)
    if op.groups:
        y = torch.group_norm(x, op.groups, gamma, beta, op.eps)
        moments, moments_error = _moments(x, e, op.groups, (2,))
        spread = [m.repeat_interleave(c // op.groups, 1)[:, :, None, None] for m in (*moments, *moments_error)]
        seen = torch.empty(2, 0, dtype=torch.float64)
    else:
        if frozen is None:
            moments, moments_error = _moments(x, e, 0, (0, 2, 3))
        else:
            moments = frozen.take(c), frozen.take(c)
            moments_error = torch.zeros(2, c, dtype=torch.float64)
        y = F.batch_norm(x, *moments, gamma, beta, training=False, eps=op.eps)
        spread = [m[:, None, None] for m in (*moments, *moments_error)]
        seen = torch.stack((torch.cat(tuple(moments)), torch.cat(tuple(moments_error))))
    gammas, betas = (1.0, 0.0) if gamma is None else (gamma.abs()[:, None, None], beta.abs()[:, None, None])
    return y, _norm_error(op.eps, gammas, betas, x, e, *spread), seen


def _moments(x: torch.Tensor, e: torch.Tensor, groups: int, axes: tuple[int, ...]):
    """Mean and variance over some axes of maps, or of groups of them, and how far those of numbers within e of x may be
    from them."""
    apart, apart_error = x - _middle_row_means(x), e + _middle_row_means(e)
    if groups:
        x, e, apart, apart_error = (of.reshape(len(x), groups, -1) for of in (x, e, apart, apart_error))
    mean, variance = x.mean(axes), x.var(axes, unbiased=False)
    double = 2.0**-40  # sums in float64 of at most 2**12 numbers
    moved_apart = apart.abs() + apart_error
    # Of sixteen numbers at a time, in float32: each is rounded, and a chain of four, and the sum of four chains.
    mean_error = e.mean(axes) + double * x.abs().mean(axes) + 6 * ULP * moved_apart.mean(axes)
    centred = (x - x.mean(axes, keepdim=True)).abs()
    moved = e + e.mean(axes, keepdim=True)
    variance_error = (2 * centred * moved + moved**2).mean(axes) + double * (x.abs() + e).square().mean(axes)
    return (mean, variance), (mean_error, variance_error + 20 * ULP * moved_apart.square().mean(axes))


def _middle_row_means(x: torch.Tensor) -> torch.Tensor:
    """The mean of each map's middle row, from which its numbers are taken before they are squared."""
    return x[:, :, x.shape[2] // 2].mean(2)[:, :, None, None]


def _norm_error(eps: float, gamma, beta, x, e, mean, variance, mean_error, variance_error) -> torch.Tensor:
    """Of y = x * a + (beta - mean * a), with a = gamma / sqrt(variance + eps)."""
    least = (variance - variance_error).clamp(min=0)
    a, most = gamma / (variance + eps).sqrt(), gamma / (least + eps).sqrt()
    moved = e + mean_error
    rounded = 5 * ULP * (most * (x.abs() + e + mean.abs() + mean_error) + beta)
    return a * moved + (most - a) * ((x - mean).abs() + moved) + rounded

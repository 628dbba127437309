"""`foreseed.models.compile` and the way back, for any torch model of supported layers."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foreseed import models
from foreseed.engine import Engine
from foreseed.engine.errors import ProgramError, ValuesError
from foreseed.engine.program import Act, Kind, Pool
from foreseed.engine.types import Samples
from foreseed.models import MaskError
from tests.models.agreement import assert_same_logits, random_mask, scramble, shard, torch_logits
from tests.models.nets import SMALL, Net, conv, head


def ops(program: Any) -> list[tuple[Kind, Act, Pool]]:
    return [(op.kind, op.act, op.pool) for op in program.ops]


# --- what it understands ---


class Residual(nn.Module):
    def __init__(self, channels: int, form: str = "+") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding="same")
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.relu(self.bn(self.conv1(x))))
        if self.form == "+":
            return self.relu(y + x)
        if self.form == "+=":
            y += x
            return self.relu(y)
        return F.relu_(torch.add(y, x))


@pytest.mark.parametrize("form", ["+", "+=", "torch.add"])
def test_own_class_with_skip_connections_gives_the_logits_of_torch(form: str) -> None:
    model = nn.Sequential(conv(), Residual(4, form), Residual(4, form), head())
    program = assert_same_logits(model, random_mask(model, 0.3), SMALL)
    block = [(Kind.CONV, Act.NONE), (Kind.NORM, Act.RELU), (Kind.CONV, Act.NONE), (Kind.ADD, Act.RELU)]
    assert [(op.kind, op.act) for op in program.ops][1:9] == block * 2


FORWARDS = {
    "torch.relu and view": lambda m, x: m.fc(F.max_pool2d(torch.relu(m.c(x)), 2).view(x.size(0), -1)),
    "a view of a known width": lambda m, x: m.fc(F.max_pool2d(F.relu(m.c(x)), (2, 2)).view(-1, 64)),
    "a view of sizes multiplied": lambda m, x: (
        lambda y: m.fc(y.reshape(y.shape[0], y.size(1) * y.size(2) * y.shape[3]))
    )(F.avg_pool2d(m.c(x), kernel_size=2).relu()),
    "hardswish and flatten": lambda m, x: m.fc(torch.flatten(F.avg_pool2d(F.hardswish(m.c(x)), 2), 1)),
    "the method flatten, dropout": lambda m, x: m.fc(F.dropout(F.max_pool2d(m.c(x), 2).flatten(1), 0.5, m.training)),
    "average of the inside of the padding": lambda m, x: m.fc(
        torch.reshape(F.avg_pool2d(m.c(x), 3, 2, 1, count_include_pad=False), (-1, 64))
    ),
    "average with the padding": lambda m, x: m.fc(F.avg_pool2d(m.c(x), 3, 2, padding=1).contiguous().flatten(1)),
    "padded max pool": lambda m, x: m.fc(F.max_pool2d(m.c(x), 3, stride=2, padding=1).flatten(start_dim=1)),
    "mean over the map": lambda m, x: m.g(m.c(x).mean((2, 3))),
    "mean by name": lambda m, x: m.g(torch.mean(F.relu(m.c(x)), dim=[-1, -2], keepdim=True).flatten(1)),
    "adaptive pool": lambda m, x: m.g(F.adaptive_avg_pool2d(m.c(x), (1, 1)).flatten(1)),
    "average pool of the whole size": lambda m, x: (lambda y: m.g(F.avg_pool2d(y, y.size()[2:]).view(-1, 4)))(m.c(x)),
    "a multi-layer perceptron": lambda m, x: m.o(F.relu(m.d(torch.flatten(x, 1)))),
    "a skip over linear layers": lambda m, x: m.o(m.d(x.flatten(1)) + F.hardswish(m.d2(x.flatten(1)))),
    "a tensor added to itself": lambda m, x: (lambda y: m.g((y + y).mean((2, 3))))(m.c(x)),
    "an activation of the image": lambda m, x: m.fc(F.max_pool2d(m.c(F.relu(x)), 2).flatten(1)),
    "every activation": lambda m, x: m.g(
        (torch.tanh(m.c(x)) + F.leaky_relu(m.c2(x), 0.3)).relu_().sigmoid().mean((2, 3))
        + F.gelu(m.c3(x), approximate="tanh").mean((2, 3))
        + F.silu(F.gelu(F.relu6(m.c4(x)))).mean((2, 3))
    ),
    "squeeze and excite": lambda m, x: (
        lambda y: m.g((y * F.hardsigmoid(m.se(y.mean((2, 3), keepdim=True)))).mean((2, 3)))
    )(m.c(x)),
    "squeeze and excite by linear layers": lambda m, x: (
        lambda y: m.g((m.lin(y.mean((2, 3))).sigmoid().view(x.size(0), 4, 1, 1) * y).mean((2, 3)))
    )(m.c(x)),
    "a product in place": lambda m, x: (lambda y: m.g(y.mul_(m.c2(x)).mean((2, 3)) + y.mean((2, 3))))(m.c(x)),
    "a square": lambda m, x: (lambda y: m.g(torch.mul(y, y).mean((2, 3))))(m.c(x)),
    "maps joined": lambda m, x: m.fc8(torch.cat([m.c(x), F.relu(m.c2(x))], 1).mean((2, 3))),
    "rows joined": lambda m, x: m.o(torch.cat((m.d3(x.flatten(1)), m.d4(x.flatten(1))), -1)),
    "three joined with the image": lambda m, x: m.fc8(torch.cat([x, m.c(x), x], dim=1).mean((2, 3))),
    "padded unevenly": lambda m, x: m.g(m.c(F.pad(x, (1, 2, 0, 3))).mean((2, 3))),
    "a layer twice": lambda m, x: m.g(m.c4s(F.relu(m.c4s(m.c(x)))).mean((2, 3))),
    "a linear layer twice": lambda m, x: m.o(m.sq(F.gelu(m.sq(m.d(x.flatten(1)))))),
    "a norm twice": lambda m, x: m.g(F.leaky_relu(m.gn(F.max_pool2d(m.gn(m.c(x)), 2)), 0.1).mean((2, 3))),
    "pools in ceil mode": lambda m, x: m.g(
        F.avg_pool2d(F.max_pool2d(m.c(x), 3, 2, ceil_mode=True), 3, 2, 1, ceil_mode=True).mean((2, 3))
    ),
    "average of the inside in ceil mode": lambda m, x: m.g(
        F.avg_pool2d(m.c(x), 3, 2, 1, ceil_mode=True, count_include_pad=False).mean((2, 3))
    ),
    "adaptive pools": lambda m, x: m.g(
        F.adaptive_avg_pool2d(F.adaptive_avg_pool2d(F.adaptive_avg_pool2d(m.c(x), (3, None)), (4, 5)), 2).mean((2, 3))
    ),
    "a pool of the image": lambda m, x: m.fc(m.c(F.max_pool2d(x, 2)).flatten(1)),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_functional_style_gives_the_logits_of_torch(name: str) -> None:
    layers = {"c": conv(), "fc": nn.Linear(64, 3), "g": nn.Linear(4, 3)}
    layers |= {"d": nn.Linear(128, 7), "d2": nn.Linear(128, 7), "o": nn.Linear(7, 3)}
    layers |= {"c2": conv(), "c3": conv(), "c4": conv(), "c4s": conv(4), "se": nn.Conv2d(4, 4, 1)}
    layers |= {"lin": nn.Linear(4, 4), "fc8": nn.Linear(8, 3), "d3": nn.Linear(128, 3), "d4": nn.Linear(128, 4)}
    layers |= {"sq": nn.Linear(7, 7), "gn": nn.GroupNorm(2, 4)}
    assert_same_logits(Net(FORWARDS[name], **layers), None, SMALL)


def test_depthwise_separable_net_gives_the_logits_of_torch() -> None:
    def separable(n_in: int, n_out: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(n_in, n_in, 3, stride, 1, groups=n_in, bias=False)
        return [depthwise, nn.BatchNorm2d(n_in), nn.Hardswish(), nn.Conv2d(n_in, n_out, 1), nn.GroupNorm(2, n_out)]

    model = nn.Sequential(nn.Conv2d(3, 6, (3, 5), (2, 1), (1, 2)), *separable(6, 8, 2), *separable(8, 4, 1), head())
    assert_same_logits(model, random_mask(model, 0.4), (3, 12, 10))
    assert_same_logits(model, None, (3, 12, 10))


@pytest.mark.parametrize("padding", [0, 3, "same"])
def test_dilated_convs_give_the_logits_of_torch(padding: Any) -> None:
    dilated = nn.Conv2d(2, 4, 3, padding=padding, dilation=(2, 3))
    model = nn.Sequential(dilated, nn.SiLU(), nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(4, 4, (1, 3), dilation=2), head())
    program = assert_same_logits(model, random_mask(model, 0.5), (2, 12, 12))
    assert [op.dilation for op in program.ops if op.kind is Kind.CONV] == [(2, 3), (1, 2), (1, 1)]


def test_batch_norm_of_rows_gives_the_logits_of_torch() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    program = assert_same_logits(model, random_mask(model, 0.5), SMALL)
    assert [op.kind for op in program.ops] == [Kind.CONV, Kind.NORM, Kind.CONV]


def test_a_layer_used_twice_has_its_values_once_and_works_twice() -> None:
    shared = conv(4)
    model = nn.Sequential(conv(), shared, nn.ReLU(), shared, head())
    mask = random_mask(model, 0.5)
    program = assert_same_logits(model, mask, SMALL)
    once = assert_same_logits(nn.Sequential(conv(), conv(4), head()), None, SMALL)
    assert [op.owner for op in program.ops] == [None, None, 1, None]
    live = int(mask["1.weight"].sum())
    assert [layer.n_values for layer in program.layers()][1:3] == [live + 4, 0]
    assert [layer.macs for layer in program.layers()][1:3] == [live * 64] * 2
    assert [layer.dense_macs for layer in program.layers()][1:3] == [once.layers()[1].dense_macs] * 2
    _, values = models.compile(model, mask, input_shape=SMALL)
    models.restore(model, program, array("f", [2 * x for x in values]))
    assert models.bind(model, program).read() == array("f", [2 * x for x in values])


def test_batch_statistics_are_those_of_torch_in_training() -> None:
    model = scramble(nn.Sequential(conv(), nn.BatchNorm2d(4, affine=False), nn.ReLU(), head())).train()
    program, values = models.compile(model, input_shape=SMALL)
    records = shard(SMALL, 6)
    logits = Engine(program, batch=6).logits(values, Samples.records(records, program.image_bytes))
    given = np.frombuffer(logits, np.float32).reshape(6, 3)
    np.testing.assert_allclose(given, torch_logits(model, program, records), rtol=1e-4, atol=1e-5)


def test_in_place_calls_change_every_name_of_their_tensor() -> None:
    def preactivation(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        F.relu(y, inplace=True)  # its result is not even used, and y is changed
        flat = y.flatten(1)
        kept = y
        y += m.c2(y)
        return m.fc(flat) + m.fc2(kept.flatten(1))

    layers = {"c": conv(), "c2": conv(4), "fc": nn.Linear(256, 3), "fc2": nn.Linear(256, 3)}
    assert_same_logits(Net(preactivation, **layers), None, SMALL)


def test_layers_that_the_logits_do_not_need_are_left_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        m.unused(y)
        return m.head(y)

    program = assert_same_logits(Net(forward, c=conv(), unused=conv(4), head=head()), None, SMALL)
    assert [layer.name for layer in program.layers()] == ["c", "head.2"]


def test_names_are_module_paths_and_functions_have_a_name_too() -> None:
    model = Net(lambda m, x: m.head(F.relu(m.a(x) + m.b(x))), a=conv(), b=conv(), head=head())
    program, _ = models.compile(model, input_shape=SMALL)
    assert [layer.name for layer in program.layers()] == ["a", "b", "add", "head.0", "head.2"]


# --- fusion ---


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([conv(), nn.ReLU(), nn.MaxPool2d(2)], [(Kind.CONV, Act.RELU, Pool.MAX)]),
        ([conv(), nn.Hardswish()], [(Kind.CONV, Act.HARDSWISH, Pool.NONE)]),
        ([conv(), nn.AvgPool2d(2)], [(Kind.CONV, Act.NONE, Pool.AVERAGE)]),
        ([conv(), nn.MaxPool2d(2), nn.ReLU()], [(Kind.CONV, Act.RELU, Pool.MAX)]),
        (
            [conv(), nn.MaxPool2d(2), nn.Hardswish()],
            [(Kind.CONV, Act.NONE, Pool.MAX), (Kind.ACT, Act.HARDSWISH, Pool.NONE)],
        ),
        ([conv(), nn.AvgPool2d(2), nn.ReLU()], [(Kind.CONV, Act.NONE, Pool.AVERAGE), (Kind.ACT, Act.RELU, Pool.NONE)]),
        (
            [conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)],
            [(Kind.CONV, Act.NONE, Pool.NONE), (Kind.NORM, Act.RELU, Pool.NONE), (Kind.POOL, Act.NONE, Pool.MAX)],
        ),
        ([conv(), nn.ReLU(), nn.Identity(), nn.Dropout(), nn.MaxPool2d(2)], [(Kind.CONV, Act.RELU, Pool.MAX)]),
    ],
)  # fmt: skip
def test_what_follows_a_layer_is_joined_to_it_only_where_that_is_the_same(layers: Any, expected: Any) -> None:
    side = 8 if all("Pool" not in type(layer).__name__ for layer in layers) else 4
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * side * side, 3))
    assert ops(assert_same_logits(model, None, SMALL))[:-1] == expected


def test_a_tensor_with_two_readers_is_not_joined() -> None:
    model = Net(lambda m, x: (lambda y: m.head(F.relu(y) + y))(m.c(x)), c=conv(), head=head())
    program = assert_same_logits(model, None, SMALL)
    assert [op.kind for op in program.ops][:3] == [Kind.CONV, Kind.ACT, Kind.ADD]


# --- values, masks, and the way back ---


def test_values_are_live_weights_then_biases_then_norm_parameters_in_order() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, (1, 2)), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(2, 2, bias=False)
    )  # fmt: skip
    with torch.no_grad():
        for start, p in zip((1, 5, 7, 9, 11), model.parameters(), strict=True):
            p.copy_(torch.arange(start, start + p.numel()).view(p.shape))
    mask = {"0.weight": torch.tensor([[[[0, 1]]], [[[1, 0]]]])}
    program, values = models.compile(model, mask, input_shape=(1, 1, 2))
    assert values == array("f", [2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    assert program.n_live == 12


def test_pixels_enter_normalised() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    program, _ = models.compile(model, input_shape=(2, 1, 1), mean=[0.25, 0.5], std=[0.5, 2.0])
    assert program.scale == pytest.approx((1 / 127.5, 1 / 510))
    assert program.shift == (-0.5, -0.25)
    program, _ = models.compile(model, input_shape=(2, 1, 1))
    assert program.scale == pytest.approx((1 / 127.5, 1 / 127.5))
    assert program.shift == (-1.0, -1.0)


def sparse_model() -> tuple[nn.Module, dict[str, Tensor]]:
    model = scramble(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(4), nn.GroupNorm(2, 4), head()))
    return model, random_mask(model, 0.4)


def test_restore_writes_back_the_same_bits_and_zeroes_what_is_pruned() -> None:
    model, mask = sparse_model()
    program, values = models.compile(model, mask, input_shape=SMALL)
    stats = models.stats(model, program)
    other, _ = sparse_model()
    scramble(other, seed=1)
    models.restore(other, program, values, stats)
    for name, theirs in model.state_dict().items():
        expected = theirs * mask[name] if name in mask else theirs
        assert torch.equal(other.state_dict()[name], expected), name
    assert models.compile(other, mask, input_shape=SMALL)[1] == values
    assert models.bind(other, program).read() == values
    assert models.stats(other, program) == stats


def test_restore_leaves_statistics_alone_unless_given() -> None:
    model, mask = sparse_model()
    program, values = models.compile(model, mask, input_shape=SMALL)
    before = models.stats(model, program)
    models.restore(model, program, array("f", [0.5] * len(values)))
    assert models.stats(model, program) == before
    assert models.bind(model, program).read() == array("f", [0.5] * len(values))


def test_gradients_come_in_the_order_of_the_values() -> None:
    model, mask = sparse_model()
    program, values = models.compile(model, mask, input_shape=SMALL)
    binding = models.bind(model, program)
    assert set(binding.gradient()) == {0.0}
    sum((p**2).sum() / 2 for p in model.parameters()).backward()
    assert binding.gradient() == values


def test_compile_only_reads_the_model() -> None:
    model, mask = sparse_model()
    model.train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    generator = torch.get_rng_state()
    models.compile(model, mask, input_shape=SMALL)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_mask_of_ones_is_dense() -> None:
    model = scramble(nn.Sequential(nn.Flatten(), nn.Linear(128, 3)))
    dense = models.compile(model, input_shape=SMALL)
    ones = models.compile(model, {"1.weight": torch.ones(3, 128)}, input_shape=SMALL)
    assert (dense[0].bytes, dense[1]) == (ones[0].bytes, ones[1])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ({"0.wieght": torch.ones(4, 2, 3, 3)}, ["'0.wieght'", "did you mean '0.weight'?"]),
        ({"0.bias": torch.ones(4)}, ["'0.bias'", "only those can be pruned"]),
        ({"1.weight": torch.ones(4)}, ["'1.weight'", "only those can be pruned"]),
        ({"0.weight": torch.ones(4, 2, 3)}, ["'0.weight'", "(4, 2, 3)", "(4, 2, 3, 3)"]),
        ({"0.weight": [1, 0]}, ["a list given", "(4, 2, 3, 3)"]),
        ({"0.weight": torch.full((4, 2, 3, 3), 0.5)}, ["holds 0.5", "0 (pruned) and 1 (live)"]),
        ({"0.weight": torch.full((4, 2, 3, 3), float("nan"))}, ["holds nan"]),
        ({"0.weight": torch.zeros(4, 2, 3, 3)}, ["'0.weight'", "prunes all 72 weights"]),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, words: list[str]) -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), head())
    with pytest.raises(MaskError) as caught:
        models.compile(model, mask, input_shape=SMALL)
    assert all(word in str(caught.value) for word in words), caught.value


def test_values_that_do_not_fit_are_refused() -> None:
    model, mask = sparse_model()
    program, values = models.compile(model, mask, input_shape=SMALL)
    with pytest.raises(ValuesError, match=rf"expected {4 * len(values)} "):
        models.restore(model, program, values[:-1])
    with pytest.raises(ValuesError, match="statistics: 0 bytes given, expected 32"):
        models.restore(model, program, values, array("f"))
    with torch.no_grad():
        model[0].bias[0] = float("nan")
    with pytest.raises(ValuesError, match=r"the parameters of Sequential: number \d+ is nan"):
        models.compile(model, mask, input_shape=SMALL)


def test_a_program_of_another_model_is_refused() -> None:
    model, mask = sparse_model()
    program, values = models.compile(model, mask, input_shape=SMALL)
    for other in (nn.Sequential(conv(), head()), nn.Sequential(*list(model)[:-1], nn.Dropout(), nn.ReLU(), head())):
        with pytest.raises(ProgramError, match="not compiled from this Sequential"):
            models.restore(other, program, values)


# --- any net ---


@st.composite
def nets(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, int, int]]:
    """A random small net of supported layers, and its input shape."""
    c, h, w = shape = draw(st.tuples(st.integers(1, 3), st.integers(3, 9), st.integers(3, 9)))
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["conv", "conv", "act", "pool", "norm", "residual"]))
        if kind == "conv":
            groups = draw(st.sampled_from([g for g in (1, 2, 3) if c % g == 0]))
            out = groups * draw(st.integers(1, 3))
            kernel = draw(st.tuples(st.integers(1, min(3, h)), st.integers(1, min(3, w))))
            stride, padding = draw(st.integers(1, 2)), draw(st.integers(0, 2))
            layers.append(nn.Conv2d(c, out, kernel, stride, padding, groups=groups, bias=draw(st.booleans())))
            c, h, w = out, (h + 2 * padding - kernel[0]) // stride + 1, (w + 2 * padding - kernel[1]) // stride + 1
        elif kind == "act":
            plain = draw(st.sampled_from([nn.Tanh(), nn.Sigmoid(), nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(0.2)]))
            kind_of_act = draw(
                st.sampled_from([nn.ReLU, nn.Hardswish, nn.ReLU6, nn.SiLU, nn.Hardsigmoid, nn.LeakyReLU])
            )
            layers.append(draw(st.sampled_from([plain, kind_of_act(inplace=draw(st.booleans()))])))
        elif kind == "pool":
            k, s = draw(st.integers(1, min(3, h, w))), draw(st.integers(1, 2))
            p = draw(st.integers(0, k // 2))
            inside, ceil = draw(st.booleans()), draw(st.booleans())
            pools = [nn.MaxPool2d(k, s, p, ceil_mode=ceil), nn.AvgPool2d(k, s, p, ceil, inside)]
            layers.append(draw(st.sampled_from([*pools, nn.AdaptiveAvgPool2d((k, None)), nn.ZeroPad2d((p, s, 0, k))])))
            _, h, w = layers[-1](torch.zeros(1, h, w)).shape
        elif kind == "norm":
            affine = draw(st.booleans())
            layers.append(draw(st.sampled_from([nn.BatchNorm2d(c, affine=affine), nn.GroupNorm(1, c, affine=affine)])))
        else:
            layers.append(Residual(c, draw(st.sampled_from(["+", "+=", "torch.add"]))))
    if draw(st.booleans()):
        layers, h, w = [*layers, nn.AdaptiveAvgPool2d(1)], 1, 1
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(c * h * w, draw(st.integers(1, 4)))), shape


@settings(max_examples=60, deadline=None)
@given(net=nets(), density=st.sampled_from([None, 0.1, 0.5, 1.0]))
def test_any_net_of_supported_layers_gives_the_logits_of_torch(
    net: tuple[nn.Module, tuple[int, int, int]], density: float | None
) -> None:
    model, shape = net
    mask = None if density is None else random_mask(model, density)
    program = assert_same_logits(model, mask, shape)
    _, values = models.compile(model, mask, input_shape=shape)
    models.restore(model, program, values)
    assert models.compile(model, mask, input_shape=shape)[1] == values

"""Promises that only the C engine makes: plans, budgets, and the same bits however it runs."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreseed.engine import BudgetError, Directions, ForeseedError, Samples, SamplesError, ValuesError
from foreseed.engine.native import NativeEngine, isa, isas, perturb
from foreseed.models import build, compile
from tests.engine.programs import programs, records

BATCHES = (
    {"batch": 1}, {"batch": 5}, {"batch": 7, "lanes": 2}, {"batch": 16}, {"batch": 33, "lanes": 8},
    {"batch": 40, "lanes": 16, "directions": 5}, {"batch": 3, "lanes": 4, "by_row": True}, {"batch": 1, "by_row": True},
)  # fmt: skip


@pytest.fixture(scope="module")
def lenet():
    model = build("lenet5", (3, 32, 32), 10)
    rng = np.random.default_rng(0)
    shares = {"conv1": 0.744, "conv2": 0.70, "fc1": 0.071, "fc2": 0.042, "fc3": 0.408}
    weights = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    mask = {name: np_mask(rng, p.shape, share) for (name, p), share in zip(weights, shares.values(), strict=True)}
    return compile(model, mask)


def np_mask(rng, shape, share):
    flat = np.zeros(int(np.prod(shape)), bool)
    flat[rng.choice(flat.size, round(share * flat.size), replace=False)] = True
    return torch.from_numpy(flat.reshape(shape))


def shard(count: int, image_bytes: int = 3072, classes: int = 10) -> Samples:
    rows = np.random.default_rng(1).integers(0, 256, (count, image_bytes + 1), dtype=np.uint8)
    rows[:, 0] %= classes
    return Samples.records(rows.tobytes(), image_bytes)


@pytest.mark.parametrize("how", [{"batch": 8}, {"batch": 12}, {"batch": 20, "lanes": 8}])
def test_eight_images_fill_a_vector_where_there_are_vectors_of_sixteen(lenet, how):
    program, values = lenet
    samples, directions = shard(21), Directions(3, 1, 4, 2)
    engine, wide = NativeEngine(program, **how), NativeEngine(program, batch=16)
    if isa() == "avx512" and "FORESEED_ISA" not in os.environ:
        assert engine.lanes == 8
    assert engine.probe(values, samples, directions) == wide.probe(values, samples, directions)


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from(BATCHES[1:]))
def test_same_bits_for_every_batch_layout_and_instruction_set(drawn, how):
    program, values, samples = drawn.program, drawn.values, drawn.samples
    if program.n_stats:  # with the statistics of a batch, its size is part of the question
        how = {**how, "batch": 1, "lanes": how.get("lanes", 0)}
    wanted = NativeEngine(program, batch=1)
    directions = Directions(3, 1, 4, 6, kind="gaussian", sigma=1e-3)
    expected = wanted.probe(values, samples, directions).tobytes(), wanted.logits(values, samples).tobytes()
    for instructions in {"avx2", isa()} - ({"avx2"} if isa() == "plain" else set()):
        engine = NativeEngine(program, **how, isa=instructions)
        assert engine.probe(values, samples, directions).tobytes() == expected[0]
        assert engine.logits(values, samples).tobytes() == expected[1]
        assert engine.observed_bytes <= engine.planned_bytes


@settings(max_examples=30, deadline=None)
@given(programs(), st.sampled_from(BATCHES))
def test_plain_loops_agree_to_rounding(drawn, how):
    if drawn.program.n_stats:
        how = {**how, "batch": 1}
    plain = NativeEngine(drawn.program, **how, isa="plain").logits(drawn.values, drawn.samples)
    best = NativeEngine(drawn.program, **how).logits(drawn.values, drawn.samples)
    scale = max(1.0, *(abs(x) for x in best))
    assert np.allclose(plain, best, rtol=0, atol=2e-4 * scale)


def test_two_threads_give_the_bits_of_one(lenet):
    program, values = lenet
    samples, k = shard(48), 20
    whole = NativeEngine(program, batch=32, directions=4).probe(values, samples, Directions(1, 2, 3, k))
    halves: dict[int, array[float]] = {}

    def probe(first: int) -> None:
        engine = NativeEngine(program, batch=32, directions=4)
        halves[first] = engine.probe(values, samples, Directions(1, 2, 3, k // 2, first=first, step=2))

    threads = [threading.Thread(target=probe, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert halves[0] == whole[0::2]
    assert halves[1] == whole[1::2]


def test_probe_is_the_loss_of_perturbed_values(lenet):
    program, values = lenet
    engine, samples = NativeEngine(program, batch=32, directions=4), shard(40)
    directions = Directions(9, 8, 7, 5, first=2, step=3, kind="rademacher", sigma=0.01)
    losses = engine.probe(values, samples, directions)
    for k, loss in zip(directions.numbers(), losses, strict=True):
        assert engine.loss(perturb(values, directions, k), samples)[0] == loss


def test_pruned_lenet_fits_96_kib_with_everything_and_64_without_a_perturbed_copy(lenet):
    program, _ = lenet
    assert NativeEngine(program, batch=1).planned_bytes <= 96 * 1024
    small = NativeEngine(program, memory_budget=64 * 1024)
    assert small.planned_bytes <= 64 * 1024
    assert small.by_row


def test_budget_picks_the_largest_batch_that_fits(lenet):
    program, _ = lenet
    for budget in (70_000, 100_000, 300_000, 700_000):
        engine = NativeEngine(program, batch=64, memory_budget=budget)
        assert engine.planned_bytes <= budget
        assert engine.batch == 64 or NativeEngine(program, batch=engine.batch + 1).planned_bytes > budget


def test_budget_too_small_says_what_is_needed(lenet):
    program, _ = lenet
    with pytest.raises(BudgetError, match=r"needs at least \d+ bytes, the budget is 1000") as caught:
        NativeEngine(program, memory_budget=1000)
    assert NativeEngine(program, memory_budget=caught.value.needed).planned_bytes == caught.value.needed


def test_label_out_of_range_is_named(lenet):
    program, values = lenet
    rows = np.zeros((3, 3073), np.uint8)
    rows[1, 0] = 10
    with pytest.raises(SamplesError, match="sample 1 has label 10, the program has 10 classes"):
        NativeEngine(program).loss(values, Samples.records(rows.tobytes(), 3072))


def test_samples_beyond_their_buffer_are_refused(lenet):
    program, values = lenet
    with pytest.raises(SamplesError, match="reach beyond"):
        NativeEngine(program).loss(values, Samples(b"\0" * 3073, 2, 3073))
    with pytest.raises(SamplesError, match="at least one"):
        NativeEngine(program).loss(values, Samples(b"\0" * 3073, 0, 3073))


def test_values_of_another_length_or_not_finite_are_refused(lenet):
    program, values = lenet
    engine, samples = NativeEngine(program), shard(2)
    with pytest.raises(ValuesError, match=f"expected {4 * program.n_live}"):
        engine.loss(values[:-1], samples)
    broken = array("f", values)
    broken[7] = float("nan")
    with pytest.raises(ValuesError, match="number 7 is nan"):
        engine.probe(broken, samples, Directions(1, 1, 1, 1))


def test_overflow_is_an_error_not_a_number(lenet):
    program, values = lenet
    huge = array("f", (x * 1e30 for x in values))
    with pytest.raises(ValuesError, match="not finite"):
        NativeEngine(program).loss(huge, shard(2))


@pytest.mark.parametrize("how", [{"batch": 0}, {"directions": 0}, {"lanes": 3}, {"isa": "sse9"}, {"batch": 1 << 40}])
def test_nonsense_configurations_are_refused(lenet, how):
    with pytest.raises(ForeseedError):
        NativeEngine(lenet[0], **how)


@pytest.mark.parametrize("how", [{"count": 0}, {"seed": -1}, {"seed": 1 << 64}, {"kind": "x"}, {"device": 1 << 32}])
def test_nonsense_directions_are_refused(how):
    with pytest.raises(ForeseedError):
        Directions(**{"seed": 1, "round": 1, "device": 1, "count": 1, **how})


class Residual(nn.Module):
    """Three sums: of a norm and what it was made of, the other way round, and of two norms; two with an activation."""

    def __init__(self, norm, act):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(norm() for _ in range(4))
        self.acts = nn.ModuleList(act() for _ in range(2))
        self.fc = nn.Linear(8 * 16 * 16, 10)

    def forward(self, x):
        x = self.first(x)
        x = self.acts[0](self.norms[0](self.convs[0](x)) + x)
        x = x + self.norms[1](self.convs[1](x))
        x = self.acts[1](self.norms[2](self.convs[2](x)) + self.norms[3](self.convs[3](x)))
        return self.fc(torch.flatten(x, 1))


@pytest.mark.parametrize("act", [nn.ReLU, nn.Hardswish, nn.SiLU, nn.Identity])
@pytest.mark.parametrize("norm", [partial(nn.GroupNorm, 2, 8), partial(nn.BatchNorm2d, 8)], ids=["group", "batch"])
def test_a_norm_and_the_add_behind_it_are_one_pass_to_the_same_bits(norm, act):
    torch.manual_seed(0)
    program, values = compile(Residual(norm, act), input_shape=(3, 32, 32))
    samples = shard(21)
    stats = NativeEngine(program, batch=21).batch_stats(values, samples) if program.n_stats else None
    for name in isas():
        one, wide = (NativeEngine(program, batch=batch, lanes=batch, isa=name) for batch in (1, 16))
        assert wide.logits(values, samples, stats) == one.logits(values, samples, stats), name


def batch_norm_on_pixels(rows, columns, bias, count=32):
    """A batch norm of pixels as they are read, images (image, row, column), and what tells what they are read as."""
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(rows * columns, 2))
    program, values = compile(model, input_shape=(1, rows, columns), mean=[-bias], std=[0.29])
    images = np.random.default_rng(3).integers(0, 256, (count, rows, columns), dtype=np.uint8)
    return program, values, images, lambda: images * np.float32(program.scale[0]) + np.float32(program.shift[0])


MAPS = [(9, 13), (1, 40), (40, 1), (1, 1), (16, 16), (3, 35), (1, 4096)]


@pytest.mark.parametrize("odd_row", [None, 0, -1])
@pytest.mark.parametrize("bias", [0.0, 3e3])
@pytest.mark.parametrize(("rows", "columns"), MAPS)
def test_statistics_are_right_wherever_the_mean_and_whatever_a_row(rows, columns, bias, odd_row):
    program, values, images, read = batch_norm_on_pixels(rows, columns, bias=bias)
    if odd_row is not None:
        images[:, odd_row] = 255
    x = read().astype(np.float64)
    apart = x - x[:, rows // 2].mean(1)[:, None, None]
    samples = records(images, np.zeros(len(images), np.uint8))
    for name, lanes in product(isas(), (1, 16)):
        mean, variance = NativeEngine(program, batch=32, lanes=lanes, isa=name).batch_stats(values, samples)
        assert mean == pytest.approx(x.mean(), rel=2**-23, abs=6 * 2**-24 * np.abs(apart).mean())
        double = 2**-52 * (x**2).mean()
        assert variance == pytest.approx(x.var(), rel=2**-23, abs=20 * 2**-24 * (apart**2).mean() + double)


def added_up(row, shift, fma, total=0.0, square=0.0):
    """What `docs/format.md` says of a row: its numbers + shift, and their squares, are added to what there was."""
    for at in range(0, len(row), 16):
        s, q = np.zeros(4, np.float32), np.zeros(4, np.float32)
        for i, x in enumerate(row[at : at + 16]):
            d = x + shift
            s[i % 4] += d
            q[i % 4] = fma(d, d, q[i % 4])
        total += float((s[0] + s[1]) + (s[2] + s[3]))
        square += float((q[0] + q[1]) + (q[2] + q[3]))
    return total, square


@pytest.mark.parametrize(("rows", "columns"), MAPS[:-1])
def test_statistics_are_to_the_bit_what_the_format_says(rows, columns):
    fused = ctypes.CDLL("libm.so.6").fmaf
    fused.restype, fused.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    program, values, images, read = batch_norm_on_pixels(rows, columns, bias=1.7, count=5)
    for name in isas():
        # x86 without vectors is compiled for processors without a fused multiply-add.
        fma = (lambda a, b, c: a * b + c) if name == "plain" else fused
        total = square = 0.0
        for image in read():
            middle, _ = added_up(image[rows // 2], np.float32(0), fma)
            m = np.float32(middle) * (np.float32(-1) / np.float32(columns))
            s = q = 0.0
            for row in image:
                s, q = added_up(row, m, fma, s, q)
            w = float(m) * (rows * columns)
            total, square = total + (s - w), square + (q + float(m) * (w - (s + s)))
        mean = total / images.size
        expected = [np.float32(mean), np.float32(max(square / images.size - mean * mean, 0.0))]
        for lanes in (1, 4, 16):
            engine = NativeEngine(program, batch=5, lanes=lanes, isa=name)
            assert list(engine.batch_stats(values, records(images, np.zeros(len(images), np.uint8)))) == expected


@pytest.mark.parametrize("kernel", [(33, 257), (1, 300), (40, 1), (32, 64), (3, 5)])
def test_weights_of_kernels_of_any_size_are_where_torch_has_them(kernel):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, kernel)
    features = 3 * (41 - kernel[0]) * (303 - kernel[1])
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(features, 4)).eval()
    mask = {"0.weight": np_mask(np.random.default_rng(2), conv.weight.shape, 0.1)}
    with torch.no_grad():
        conv.weight.mul_(mask["0.weight"])
    program, values = compile(model, mask, input_shape=(2, 40, 302))
    samples = shard(17, program.image_bytes, classes=4)
    rows = np.frombuffer(samples.data, np.uint8).reshape(17, -1)[:, 1:].reshape(17, 2, 40, 302)
    scale, shift = (np.asarray(numbers).reshape(2, 1, 1) for numbers in (program.scale, program.shift))
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(rows * scale + shift)).numpy()
    for how in ({"batch": 1}, {"batch": 17}):
        logits = np.asarray(NativeEngine(program, **how).logits(values, samples)).reshape(17, 4)
        np.testing.assert_allclose(logits, expected, atol=1e-4)

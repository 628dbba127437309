"""Convolutions in pieces, and of live weights alone, are torch's own."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from foreseed.engine import native
from foreseed.prune import convolution
from foreseed.prune.convolution import FewImagesAtATime, LiveWeightsAlone
from tests.engine.toolchain import ROOT, compile_all, link, need, run

OPTIONS = [*itertools.product((1, (2, 1)), (0, (2, 3)), (1, 2), (1, 2)), (1, "same", 2, 1)]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with vectors, whatever the environment asks for."""
    if native.isas() == ["plain"]:
        pytest.fail("needs AVX2 or NEON", pytrace=False)
    monkeypatch.setattr(convolution, "isa", lambda: native.isas()[0])


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.double, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients_are_those_of_the_whole(bias, options, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(1)
    images, weight, offset = (drawn(generator, *shape) for shape in ((7, 4, 9, 8), (6, 4 // options[3], 3, 2), (6,)))
    sources = (images, weight, offset) if bias else (images, weight)
    whole = functional.conv2d(images, weight, offset if bias else None, *options)
    direction = torch.randn(whole.shape, generator=generator, dtype=torch.double)
    gradients = torch.autograd.grad(whole, sources, direction)
    monkeypatch.setattr(convolution, "_PATCHES_BYTES", 3 * 8 * 9 * 8 * weight[0].numel())  # pieces of 3, 3 and 1
    with FewImagesAtATime():
        pieces = functional.conv2d(images, weight, offset if bias else None, *options)
    assert type(pieces.grad_fn).__name__ == "CatBackward0"
    assert torch.allclose(pieces, whole, rtol=1e-12, atol=1e-12)
    for got, expected in zip(torch.autograd.grad(pieces, sources, direction), gradients, strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("images", "dtype"), [((7, 4, 9, 8), torch.float), ((4, 9, 8), torch.double), ((0, 4, 9, 8), torch.double)]
)
def test_what_cannot_gain_is_left_to_torch(images, dtype, monkeypatch) -> None:
    monkeypatch.setattr(convolution, "_PATCHES_BYTES", 1)
    layer, x = nn.Conv2d(4, 6, 3).to(dtype), torch.ones(images, dtype=dtype)
    with FewImagesAtATime():
        got = layer(x)
    assert type(got.grad_fn).__name__ != "CatBackward0"
    assert torch.equal(got, layer(x))


pairs, many = (st.tuples(st.integers(1, most), st.integers(1, most)) for most in (5, 20))


@pytest.mark.usefixtures("fast")
@given(
    images=st.integers(0, 9), channels=many, size=many, kernel=pairs,
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    bias=st.booleans(), density=st.sampled_from([0.0, 0.1, 0.6, 1.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_live_weights_alone_give_what_all_do(
    images, channels, size, kernel, stride, padding, bias, density, seed
) -> None:
    padding = tuple(max(p, (k - n + 1) // 2) for p, k, n in zip(padding, kernel, size, strict=True))
    generator = torch.Generator().manual_seed(seed)
    x, weight, offset = (
        drawn(generator, *of) for of in ((images, channels[0], *size), (*channels[::-1], *kernel), channels[1:])
    )
    live = torch.rand(weight.shape, generator=generator) < density
    weight = (weight * live).detach().requires_grad_()
    sources, given = ((x, weight, offset), offset) if bias else ((x, weight), None)
    expected = functional.conv2d(x, weight, given, stride, padding)
    with LiveWeightsAlone():
        got = functional.conv2d(x, weight, given, stride, padding)
    direction = torch.randn(got.shape, generator=generator, dtype=torch.double)
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y, sources, direction) for y in (got, expected))
    assert torch.allclose(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
    assert torch.allclose(ours[1], theirs[1] * live, rtol=1e-12, atol=1e-11)
    assert not bias or torch.allclose(ours[2], theirs[2], rtol=1e-12, atol=1e-11)


@pytest.mark.usefixtures("fast")
def test_layers_of_any_layout_are_convolved_by_live_weights_unless_their_kernels_are_grouped_or_dilated() -> None:
    x = torch.randn(5, 4, 9, 8, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    for options, ours in (({}, True), ({"groups": 2}, False), ({"dilation": 2}, False), ({"padding": "same"}, False)):
        layer = nn.Conv2d(4, 6, 3, bias=False, **options).double()
        with LiveWeightsAlone():
            got = layer(x)
        assert (type(got.grad_fn).__name__ == "_ConvolutionBackward") == ours
        assert torch.allclose(got, layer(x), rtol=1e-12, atol=1e-12)


def test_without_vectors_all_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3, bias=False).double(), torch.ones(2, 4, 9, 8, dtype=torch.double)
    for isa in (None, lambda: "plain"):
        monkeypatch.setattr(convolution, "isa", isa)
        with LiveWeightsAlone():
            assert type(layer(x).grad_fn).__name__ != "_ConvolutionBackward"


@pytest.mark.usefixtures("fast")
def test_images_that_do_not_fit_the_kernel_are_refused_by_torch() -> None:
    for shape in ((2, 3, 9, 8), (2, 4, 2, 8)):
        with LiveWeightsAlone(), pytest.raises(RuntimeError, match=r"channels|Kernel size"):
            nn.Conv2d(4, 6, 3).double()(torch.ones(shape, dtype=torch.double))


@pytest.mark.slow
def test_sums_are_the_same_bits_on_arm_and_stay_within_their_memory(tmp_path: Path) -> None:
    sources = [ROOT / "csrc/host/conv64.c", ROOT / "tests/prune/portable/convolve.c"]
    packages = "gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
    said = set()
    for compiler, start, *flags in (
        ("gcc", [], "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        ("aarch64-linux-gnu-gcc", ["qemu-aarch64"], "-static"),
    ):
        for tool in (compiler, *start):
            need(tool, packages)
        folder = tmp_path / compiler
        built = compile_all([compiler], sources, folder, "-O2", "-Wall", "-Wextra", "-Werror", *flags)
        said.add(run([*start, link([compiler], built, folder / "convolve", *flags)]))
    assert len(said) == 1
    assert len(set(said.pop().split())) > 20

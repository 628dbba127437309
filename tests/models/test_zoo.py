"""The named models: their published sizes, their logits, and `build`."""

from __future__ import annotations

import hashlib
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foreseed import models
from foreseed.config import Model
from foreseed.engine import Engine
from foreseed.engine.program import Kind
from foreseed.engine.types import Samples
from foreseed.models import ModelError, UnknownModelError
from foreseed.prune import foresight, rescale
from tests.models.agreement import assert_same_logits, random_mask, shard

FIGURES = [
    ("lenet5", 10, "group", 62_006, 61_770, 651_720),
    ("lenet5-wide", 10, "group", 782_006, 781_770, 2_293_320),
    ("lenet5-wide", 100, "group", 783_092, 782_850, 2_294_400),
    ("resnet20", 10, "batch", 272_474, 270_896, 40_813_184),
    ("resnet20", 10, "group", 272_474, 270_896, 40_813_184),
    ("resnet20", 100, "batch", 278_324, 276_656, 40_818_944),
    ("mobilenetv2-tiny", 10, "group", 117_738, 111_280, 5_171_200),
    ("mobilenetv3-small", 100, "batch", 1_620_356, 1_604_232, 17_599_488),
    ("squeezenet", 10, "batch", 727_626, 724_672, 16_917_248),
    ("dscnn", 10, "batch", 28_170, 27_008, 7_172_736),
    ("lenet-baffle", 10, "group", 27_530, 27_440, 7_783_040),
    ("lenet-baffle", 10, "none", 27_530, 27_440, 7_783_040),
    ("lenet-baffle", 100, "batch", 117_860, 117_600, 28_684_800),
]


@pytest.mark.parametrize(("name", "classes", "norm", "parameters", "prunable", "macs"), FIGURES)
def test_parameters_and_macs_are_the_published_ones(
    name: str, classes: int, norm: str, parameters: int, prunable: int, macs: int
) -> None:
    program, values = models.compile(models.build(name, (3, 32, 32), classes, norm=norm))
    layers = program.layers()
    assert sum(layer.n_values for layer in layers) == program.n_live == len(values) == parameters
    assert sum(layer.n_weights for layer in layers) == prunable
    assert sum(layer.macs for layer in layers) == macs
    assert program.classes == classes


@pytest.mark.parametrize("density", [None, 0.1])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet5", {"activation": "relu"}),
        ("lenet5", {"activation": "hardswish"}),
        ("lenet5-wide", {"activation": "relu"}),
        ("resnet20", {"norm": "batch", "activation": "relu"}),
        ("resnet20", {"norm": "group", "activation": "hardswish"}),
        ("mobilenetv2-tiny", {"norm": "batch"}),
        ("mobilenetv2-tiny", {"norm": "group"}),
        ("mobilenetv3-small", {"norm": "batch"}),
        ("mobilenetv3-small", {"norm": "group"}),
        ("squeezenet", {}),
        ("dscnn", {"norm": "batch"}),
        ("lenet-baffle", {"norm": "group"}),
        ("lenet-baffle", {"norm": "batch", "activation": "relu"}),
        ("lenet-baffle", {"norm": "none"}),
    ],
)
def test_logits_are_those_of_torch(name: str, options: dict[str, str], density: float | None) -> None:
    model = models.build(name, (3, 32, 32), 10, **options)
    assert_same_logits(model, density and random_mask(model, density), count=2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lenet5", (1, 28, 28)),
        ("lenet5", (1, 32, 32)),
        ("lenet5", (3, 24, 40)),
        ("lenet5-wide", (1, 28, 28)),
        ("resnet20", (1, 28, 28)),
        ("mobilenetv2-tiny", (1, 65, 70)),
        ("mobilenetv3-small", (3, 64, 72)),
        ("squeezenet", (3, 33, 45)),
        ("dscnn", (1, 49, 10)),
        ("lenet-baffle", (1, 28, 28)),
    ],
)
def test_other_image_sizes_give_the_logits_of_torch(name: str, shape: tuple[int, int, int]) -> None:
    model = models.build(name, shape, 7)
    assert_same_logits(model, random_mask(model, 0.1), shape, count=1)


@pytest.mark.parametrize("name", list(models.MODELS)[3:])
def test_models_of_small_devices_are_pruned_and_agree_with_float64(name: str) -> None:
    shape = (3, 32, 32)
    model = models.build(name, shape, 10, norm="group")
    pruned = foresight(model, 0.2, pruner="ntk-rand", input_shape=shape, iterations=2, redraws=1, batch=4, seed=1)
    net = rescale(model, pruned.mask).eval()
    program, values = models.compile(net, pruned.mask, input_shape=shape)
    assert program.n_live == len(values)
    records = shard(shape, 2)
    logits = Engine(program, batch=2).logits(values, Samples.records(records, program.image_bytes))
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, *shape)).double()
    scale, shift = (torch.tensor(x, dtype=torch.float64).view(-1, 1, 1) for x in (program.scale, program.shift))
    expected = net.double()(pixels * scale + shift).detach().numpy()
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(
        np.reshape(logits, expected.shape), expected, rtol=0, atol=2e-6 * max(1.0, float(np.abs(expected).max()))
    )


def test_a_lenet_layer_is_one_op() -> None:
    program, _ = models.compile(models.lenet5())
    assert [layer.name for layer in program.layers()] == ["conv1", "conv2", "fc1", "fc2", "fc3"]


def test_the_same_seed_gives_the_same_weights_and_the_global_generator_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    first, again, other = (models.build("lenet5", (1, 28, 28), 10, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_kaiming_init_keeps_the_signal_and_torch_init_is_pytorchs_own() -> None:
    kaiming = models.build("resnet20", (3, 32, 32), 10, init="kaiming")
    for module in kaiming.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.numel() > 2000:
            expected = (2 / module.weight[0].numel()) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.1)
        if isinstance(module, nn.GroupNorm):
            assert bool((module.weight == 1).all() and (module.bias == 0).all())
    assert not kaiming.fc.bias.any()
    like_torch = models.build("lenet5", (3, 32, 32), 10, init="torch", seed=5).fc1
    for ours, theirs in zip(like_torch.parameters(), nn.Linear(400, 120).parameters(), strict=True):
        assert 0.9 / 20 < ours.abs().max().item() <= 1 / 20
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.15)


def test_weights_are_the_same_on_every_machine() -> None:
    digests = {}
    for init in ("kaiming", "torch"):
        model = models.build("lenet5", (3, 32, 32), 10, init=init, seed=1)
        raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        digests[init] = hashlib.sha256(raw).hexdigest()[:16]
    assert digests == {"kaiming": "aed4ab544fb07fed", "torch": "f6c8ed29f2950c12"}


def test_group_norm_has_a_group_for_16_channels_but_at_least_two() -> None:
    model = models.resnet20(norm="group")
    groups = {(m.num_channels, m.num_groups, m.affine) for m in model.modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {(16, 2, True), (32, 2, True), (64, 4, True)}
    program, _ = models.compile(model)
    assert program.n_stats == 0
    assert models.compile(models.resnet20(norm="batch"))[0].n_stats == 1568
    assert sum(op.kind is Kind.NORM for op in program.ops) == 21


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("squeezenet", {"in_shape": (3, 31, 40)}, ["in_shape (3, 31, 40)", "images of 32x32 or more"]),
        ("dscnn", {"in_shape": (1, 49, 1)}, ["in_shape (1, 49, 1)", "2 columns or more"]),
        ("lenet", {}, ["model 'lenet'", "lenet5, lenet5-wide, resnet20", "did you mean 'lenet5'?", "module:factory"]),
        ("resnet-20", {}, ["did you mean 'resnet20'?"]),
        ("lenet5", {"activation": "hardswich"}, ["activation 'hardswich'", "did you mean 'hardswish'?"]),
        ("resnet20", {"norm": "grp"}, ["norm 'grp'", "batch, group"]),
        ("resnet20", {"norm": "none"}, ["norm 'none'", "expected one of batch, group;"]),
        ("resnet20", {"init": "kaimin"}, ["init 'kaimin'", "did you mean 'kaiming'?"]),
        ("lenet5", {"in_shape": (1, 8, 8)}, ["in_shape (1, 8, 8)", "too small"]),
        ("lenet5-wide", {"in_shape": (1, 12, 32)}, ["in_shape (1, 12, 32)", "too small"]),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_the_nearest_right_one(
    name: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        models.build(name, **({"in_shape": (3, 32, 32), "classes": 10} | options))
    assert all(word in str(caught.value) for word in words), caught.value


OWN_MODULE = """
from torch import nn

class Fixed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

def sized(in_shape, classes):
    c, h, w = in_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, classes))

def no_model():
    return 3

def needs_more(in_shape, depth):
    return nn.Flatten()

number = 4
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_of_a_test.py").write_text(OWN_MODULE)
    (tmp_path / "broken_models_of_a_test.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_module")
def test_a_model_of_ones_own_is_built_by_its_path() -> None:
    fixed = models.build("own_models_of_a_test:Fixed", (3, 32, 32), 10, seed=1)
    assert type(fixed).__name__ == "Fixed"
    again = models.build("own_models_of_a_test:Fixed", (3, 32, 32), 10, seed=1)
    assert torch.equal(fixed[1].weight, again[1].weight)
    sized = models.build("own_models_of_a_test:sized", (1, 4, 4), 7)
    assert sized[1].weight.shape == (7, 16)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("no_such_module_of_mine:Net", UnknownModelError, ["cannot import 'no_such_module_of_mine'", "PYTHONPATH"]),
        ("broken_models_of_a_test:Net", UnknownModelError, ["No module named 'no_such_library'"]),
        (":Net", UnknownModelError, ["cannot import ''"]),
        ("own_models_of_a_test:fixed", UnknownModelError, ["no function or class 'fixed'", "did you mean 'Fixed'?"]),
        ("own_models_of_a_test:number", UnknownModelError, ["no function or class 'number'"]),
        ("own_models_of_a_test:no_model", ModelError, ["made a int, expected a torch.nn.Module"]),
        ("own_models_of_a_test:needs_more", ModelError, ["its factory failed", "depth", "in_shape and classes"]),
        ("builtins:dict", ModelError, ["model 'builtins:dict'"]),
    ],
)
def test_a_path_that_leads_to_no_model_is_refused(path: str, error: type[ModelError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        models.build(path, (3, 32, 32), 10)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_is_found_in_the_current_folder_too_and_the_search_path_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_in_a_folder.py").write_text("width = 5")
    (tmp_path / "model_in_a_folder.py").write_text(
        "from torch import nn\ndef make():\n    from helper_in_a_folder import width\n    return nn.Linear(width, 2)\n"
    )
    before = list(sys.path)
    with pytest.raises(UnknownModelError, match="start foreseed in the folder that holds it"):
        models.build("model_in_a_folder:make", (1, 1, 5), 2)
    monkeypatch.chdir(tmp_path)
    assert models.build("model_in_a_folder:make", (1, 1, 5), 2).in_features == 5
    assert sys.path == before


def test_models_have_the_defaults_of_an_experiment() -> None:
    wanted = Model().model_dump(include={"activation", "norm", "init"})
    for make in (models.build, *models.MODELS.values()):
        given = {name: parameter.default for name, parameter in signature(make).parameters.items()}
        assert {name: given[name] for name in wanted if name in given}.items() <= wanted.items()
        assert "init" in given

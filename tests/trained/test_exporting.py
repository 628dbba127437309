"""What is exported computes what the engine does, on the whole test set."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import foreseed as fs
from foreseed.config import load as load_config
from foreseed.data import HeldOut
from foreseed.engine import load as load_model
from foreseed.models import compile, stats
from foreseed.trained import ExportError, Trained, export, read_trained
from tests.engine.test_portable import ARM
from tests.engine.toolchain import need, run

# What float32 sums of some thousand terms differ by when they are added in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-4}
STRICT = "-Wall -Wextra -Werror -std=c99 -Os -ffp-contract=off -Iengine"


def classified(lines: str) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Classes and logits, as the C example prints them."""
    names, logits = zip(*(line.rsplit(" ", 1) for line in lines.splitlines()), strict=True)
    return list(names), np.array(logits, np.float64)


def test_torch(trained: Trained, tests: HeldOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = trained.name.replace("-", "_")
    weights, script = export(trained, "torch", tmp_path / f"{trained.name}.pt")
    assert script.name == f"{name}.py"
    monkeypatch.syspath_prepend(tmp_path)
    rebuilt = import_module(name)
    try:
        with torch.no_grad():
            logits = rebuilt.model()(rebuilt.inputs(tests.images)).numpy()
    finally:
        del sys.modules[name]
    np.testing.assert_allclose(logits, trained.logits(tests.images), **CLOSE)
    assert tests.classes == rebuilt.CLASSES
    state = torch.load(weights, weights_only=True)
    pruned = sum(int((tensor == 0).sum()) for key, tensor in state.items() if key.endswith("weight"))
    assert pruned >= sum(layer.n_dense - layer.n_weights for layer in trained.program.layers()) > 0


def test_onnx(trained: Trained, tests: HeldOut, tmp_path: Path) -> None:
    (file,) = export(trained, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    expected = trained.logits(tests.images)
    logits, probabilities = session.run(["logits", "probabilities"], {"images": tests.images})
    np.testing.assert_allclose(logits, expected, **CLOSE)
    np.testing.assert_allclose(probabilities, torch.from_numpy(expected).softmax(1), atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(tests.classes)
    assert onnx.load(file).opset_import[0].version == 21


@pytest.mark.parametrize("affine", [True, False])
def test_onnx_of_every_norm(affine: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.GroupNorm(2, 4, affine=affine), nn.Flatten(),
        nn.Linear(4 * 36, 5),
    )  # fmt: skip
    model(3 * torch.randn(50, 3, 8, 8) + 1)  # statistics that are neither 0 nor 1
    program, values = compile(model, input_shape=(3, 8, 8))
    numbers = np.array(values, np.float32), np.array(stats(model, program), np.float32)
    trained = Trained("norms", load_config(), program, *numbers, tuple("abcde"))
    (file,) = export(trained, "onnx", tmp_path / "model.onnx")
    images = np.random.default_rng(5).integers(0, 256, (7, 3, 8, 8), np.uint8)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images})
    np.testing.assert_allclose(logits, trained.logits(images), **CLOSE)


def test_fsp(trained: Trained, tmp_path: Path) -> None:
    (file,) = export(trained, "fsp", tmp_path / "model.fsp")
    found = load_model(file)
    assert found.program.bytes == trained.program.bytes
    assert found.values.tobytes() == trained.values.tobytes()
    assert found.stats.tobytes() == trained.stats.tobytes()
    assert found.classes == trained.classes


@pytest.mark.slow
def test_c_here(trained: Trained, tests: HeldOut, tmp_path: Path) -> None:
    folder = tmp_path / "firmware"
    export(trained, "c", folder)
    run(["make", "-C", folder, f"CFLAGS={STRICT}"])
    images = tmp_path / "images"
    images.write_bytes(tests.images.tobytes())
    with open(images, "rb") as file:
        names, logits = classified(run([folder / "classify", "all"], stdin=file))
    expected = trained.logits(tests.images)
    assert names == [tests.classes[label] for label in expected.argmax(1)]
    np.testing.assert_allclose(logits, expected.max(1), **CLOSE)
    assert (folder / "image.bin").read_bytes() == tests.images[0].tobytes()


@pytest.mark.slow
def test_c_on_other_processors(runs: dict[str, Path], tests: HeldOut, tmp_path: Path) -> None:
    """It builds for a Cortex-M4 without a warning, and a 32-bit ARM, which can be emulated here, agrees."""
    need("arm-none-eabi-gcc", ARM)
    need("qemu-arm", "qemu-user")
    trained, folder = read_trained(runs["lenet5"]), tmp_path / "firmware"
    export(trained, "c", folder)
    run(["make", "-C", folder, "classify.elf", f"CFLAGS={STRICT}"])
    arm = "-march=armv7-a -mfpu=vfpv3-d16 -mfloat-abi=hard --specs=rdimon.specs"
    run(["make", "-C", folder, "-B", "classify.elf", f"CFLAGS={STRICT}", f"CORTEX={arm}"])
    images = tests.images[:20]
    (tmp_path / "images").write_bytes(images.tobytes())
    with open(tmp_path / "images", "rb") as file:
        names, logits = classified(run(["qemu-arm", "-cpu", "max", folder / "classify.elf"], stdin=file))
    expected = trained.logits(images)
    assert names == [tests.classes[label] for label in expected.argmax(1)]
    np.testing.assert_allclose(logits, expected.max(1), **CLOSE)


def test_c_without_the_data_of_the_run(runs: dict[str, Path], tmp_path: Path) -> None:
    trained = read_trained(runs["lenet5"])
    elsewhere = trained.config.with_({"data.set": str(tmp_path / "gone.npz")})
    names = 'a "b"', "c\\d", "é??/", *"3456789"
    other = Trained("run", elsewhere, trained.program, trained.values, trained.stats, names)
    folder = tmp_path / "firmware"
    assert {file.name for file in export(other, "c", folder)} == {"Makefile", "engine", "main.c", "model.h"}
    (tmp_path / "names.c").write_text(
        '#include <stdio.h>\n#include "model.h"\n'
        "int main(void) { for (int i = 0; i < MODEL_CLASSES; i++) puts(model_classes[i]);\n"
        "return !(sizeof model_values + sizeof model_program); }\n"
    )
    run(["gcc", "-std=c99", f"-I{folder}", tmp_path / "names.c", "-o", tmp_path / "names"])
    assert run([tmp_path / "names", "all"]).splitlines() == list(names)


def test_the_moving_average_is_another_model(runs: dict[str, Path], tests: HeldOut) -> None:
    result = fs.read(runs["lenet5"])
    trained, average = read_trained(runs["lenet5"]), read_trained(runs["lenet5"], ema=True)
    assert average.values.tobytes() != trained.values.tobytes()
    guesses = average.logits(tests.images).argmax(1)
    assert (guesses == tests.labels).mean() == pytest.approx(result.summary.final_ema_accuracy, abs=1e-9)
    with pytest.raises(ExportError, match="kept no moving average"):
        read_trained(runs["resnet20-batch"], ema=True)


def test_nothing_is_overwritten(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = fs.read(runs["lenet5"])
    assert result.export("fsp") == [Path("lenet5.fsp")]
    before = Path("lenet5.fsp").read_bytes()
    with pytest.raises(ExportError, match=r"lenet5\.fsp exists"):
        result.export("fsp")
    assert Path("lenet5.fsp").read_bytes() == before
    Path("lenet5.py").touch()
    with pytest.raises(ExportError, match=r"lenet5\.py, which goes with"):
        result.export("torch")
    assert not Path("lenet5.pt").exists()
    with pytest.raises(ExportError, match="no such folder"):
        result.export("onnx", "nowhere/model.onnx")
    with pytest.raises(ExportError, match="torch, onnx, fsp, c"):
        result.export("tflite")

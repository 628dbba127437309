"""`foreseed export`, `predict` and `evaluate`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from foreseed.cli import main
from foreseed.data import load_held_out
from tests.cli.test_experiment import TINY, refused


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["run", *TINY, "--out", str(folder), "--quiet"]) == 0
    return folder


@pytest.mark.parametrize("to", ["torch", "onnx", "fsp", "c"])
def test_export_says_what_it_wrote_and_how_to_use_it(
    to: str, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(done), "--to", to]) == 0
    *files, use = capsys.readouterr().out.splitlines()
    assert all(Path(file).exists() for file in files)
    assert use.startswith("use it: ")
    assert main(["export", str(done), "--to", to, "--out", "again.pt", "--json"]) == 0
    assert all(Path(file).exists() for file in json.loads(capsys.readouterr().out)["files"])
    assert "exists" in refused(capsys, "export", str(done), "--to", to)


def test_predict_names_a_class_for_every_image(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, image in enumerate(load_held_out("digits").images[:3]):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / f"{i}.png")
    assert main(["predict", str(done), str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["predict", str(done), str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert lines == [f"{one['file']}: {one['name']} {100 * one['probability']:.1f} %" for one in found]
    assert [Path(one["file"]).name for one in found] == ["0.png", "1.png", "2.png"]


def test_evaluate_is_what_the_run_said(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((done / "summary.json").read_text())
    assert main(["evaluate", str(done), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == summary["final_accuracy"]
    assert found["classes"]["7"]["images"] > 0
    assert main(["evaluate", str(done), "digits"]) == 0
    assert f"{100 * found['accuracy']:.2f} %" in capsys.readouterr().out


def test_mistakes_are_one_line(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tflite" in refused(capsys, "export", str(done), "--to", "tflite")
    assert "finished run" in refused(capsys, "export", str(tmp_path), "--to", "onnx")
    assert "gone.png" in refused(capsys, "predict", str(done), str(tmp_path / "gone.png"))
    assert "digits, mnist" in refused(capsys, "evaluate", str(done), "digit")
    assert "train.ema" in refused(capsys, "evaluate", str(done), "--ema")

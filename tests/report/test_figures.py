"""Every figure comes as SVG, PNG and CSV, and the CSV holds the data of the runs."""

import csv
import json
import statistics

import pytest
from matplotlib.figure import Figure
from PIL import Image

from foreseed.report import write_report
from foreseed.report.arms import group
from foreseed.report.canvas import pens, short
from foreseed.report.colours import METHODS
from foreseed.report.curves import SPENT, _along, along_axis
from foreseed.report.read import read_runs
from tests.report.runs import LENET, RESNET, write_run

NAMES = {"accuracy_rounds", "accuracy_flops", "accuracy_bytes", "loss_rounds", "memory", "layers-1", "device_sizes"}


def rows_of(report, name):
    with (report.parent / "figures" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_each_figure_comes_as_svg_png_and_csv(report):
    files = {path.name for path in (report.parent / "figures").iterdir()}
    assert {f"{name}{suffix}" for name in NAMES for suffix in (".svg", ".png", ".csv")} <= files
    for name in NAMES:
        with Image.open(report.parent / "figures" / f"{name}.png") as image:
            assert image.size[0] == 920
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20


@pytest.mark.parametrize("name", ["accuracy_rounds", "accuracy_flops", "accuracy_bytes"])
def test_the_numbers_of_a_curve_are_the_means_of_the_runs(report, compared, name):
    rows = [row for row in rows_of(report, name) if row["arm"] == "baffle"]
    metrics = [metrics_of(run) for run in compared[3:6]]
    assert [int(row["round"]) for row in rows] == list(range(5, 61, 5))
    for row in rows:
        r = int(row["round"])
        accuracies = [m[r - 1]["accuracy"] for m in metrics]
        assert float(row["accuracy"]) == pytest.approx(statistics.mean(accuracies), rel=1e-12)
        assert float(row["accuracy_std"]) == pytest.approx(statistics.stdev(accuracies), rel=1e-9)
        assert float(row["flops"]) == pytest.approx(statistics.mean(sum(x["flops"] for x in m[:r]) for m in metrics))
        spent = [sum(x["bytes_up"] + x["bytes_down"] for x in m[:r]) for m in metrics]
        assert float(row["bytes"]) == pytest.approx(statistics.mean(spent))
        assert (row["engine"], row["seeds"]) == ("difference", "3")


def test_averaged_weights_stand_beside_the_accuracy(single, single_report):
    rows = rows_of(single_report, "accuracy_rounds")
    metrics = metrics_of(single)
    assert [float(row["ema_accuracy"]) for row in rows] == [metrics[r - 1]["ema_accuracy"] for r in (5, 10)]
    assert [row["accuracy_std"] for row in rows] == ["", ""]


def test_memory_and_sizes_are_those_of_the_summaries(report, compared):
    summaries = [json.loads((run / "summary.json").read_text()) for run in compared]
    planned = {row["arm"]: float(row["bytes"]) for row in rows_of(report, "memory") if row["kind"] == "planned"}
    for i, method in enumerate(("ntk-baffle", "baffle", "fedavg")):
        of_seeds = [s["memory"]["planned_bytes"] for s in summaries[3 * i : 3 * i + 3]]
        assert planned[method] == pytest.approx(statistics.mean(of_seeds))
    observed = {row["arm"] for row in rows_of(report, "memory") if row["kind"] == "observed by the engine"}
    assert observed == {"ntk-baffle", "baffle"}
    assert [int(row["samples"]) for row in rows_of(report, "device_sizes")] == summaries[0]["partition"]["sizes"]


def test_layers_are_those_of_the_pruned_arms(report, compared):
    rows = rows_of(report, "layers-1")
    summaries = [json.loads((run / "summary.json").read_text()) for run in compared[:3]]
    assert [row["layer"] for row in rows] == [name for name, *_ in LENET]
    for i, row in enumerate(rows):
        assert float(row["density"]) == pytest.approx(statistics.mean(s["layers"][i]["density"] for s in summaries))
        assert float(row["flops"]) == pytest.approx(statistics.mean(2 * s["layers"][i]["macs"] for s in summaries))
        assert float(row["dense_flops"]) == 2 * LENET[i][3]
    assert not (report.parent / "figures" / "layers-2.svg").exists()


def test_equal_masks_are_drawn_once_and_a_dense_model_of_another_kind_on_its_own(tmp_path):
    runs = [write_run(tmp_path / n, rounds=5, name=n) for n in ("a", "b")]
    runs.append(write_run(tmp_path / "c", "fedavg", rounds=5, net=RESNET))
    report = write_report(runs, tmp_path / "out")
    assert {row["arm"] for row in rows_of(report, "layers-1")} == {"a", "b"}
    assert {row["arm"] for row in rows_of(report, "layers-2")} == {"fedavg"}


@pytest.mark.parametrize(("others", "logarithmic"), [(["baffle"], False), (["baffle", "fedavg"], True)])
def test_axes_turn_logarithmic_only_where_arms_lie_far_apart(tmp_path, others, logarithmic):
    runs = [write_run(tmp_path / m, m, rounds=20, density=0.9) for m in ("ntk-baffle", *others)]
    axes = Figure().subplots()
    curves = [arm.curve("accuracy") for arm in group(read_runs(runs))]
    along_axis(axes, [_along(curve, SPENT[1]) for curve in curves], SPENT[1])
    assert (axes.get_xscale() == "log") is logarithmic


def test_a_method_keeps_its_colour_and_its_arms_get_other_dashes(tmp_path):
    runs = [write_run(tmp_path / str(lr), lr=lr, rounds=5) for lr in (0.01, 0.02)]
    runs.append(write_run(tmp_path / "x", "baffle", rounds=5))
    first, second, other = pens(group(read_runs(runs)))
    assert first.colour == second.colour == METHODS["ntk-baffle"][0] != other.colour
    assert first.dash != second.dash
    assert len({first.marker, second.marker, other.marker}) == 3


def test_a_long_name_keeps_its_ends():
    assert short("a" * 40) == "a" * 40
    assert short("begin" + "x" * 60 + "end") == "begin" + "x" * 14 + "…" + "x" * 17 + "end"

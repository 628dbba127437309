"""The page stands alone, says what it must, and copes with whatever runs there are."""

import re

import pytest

from foreseed.report import ReportError, write_report
from foreseed.runs import RunFolderError
from tests.report.conftest import PARTITION
from tests.report.html import Page
from tests.report.runs import edit_metrics, edit_summary, write_run


@pytest.fixture(scope="module")
def page(report):
    return Page(report.read_text(encoding="utf-8"))


def test_the_page_loads_nothing_from_elsewhere(page):
    for reference in page.references:
        assert reference.startswith(("#", "data:text/csv;base64,", "data:image/")), reference[:80]
    for style in page.styles:
        assert "@import" not in style
        assert re.findall(r"url\((?!#)", style) == []
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)


def test_ids_are_unique_and_every_link_inside_the_page_leads_somewhere(page, report):
    assert len(page.ids) == len(set(page.ids))
    used = {reference[1:] for reference in page.references if reference.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]*)\)", report.read_text(encoding="utf-8")))
    assert used <= set(page.ids)
    assert len(used) > 20


def test_every_figure_has_a_title_a_caption_of_one_sentence_and_a_drawing(report):
    text = report.read_text(encoding="utf-8")
    figures = re.findall(r"<figure.*?</figure>", text, re.S)
    assert len(figures) == 9
    for figure in figures:
        assert re.search(r"<h3>[^<]+</h3>", figure)
        caption = re.search(r"<figcaption[^>]*>(.*?)<a ", figure, re.S)[1].strip()
        assert caption.endswith(".")
        assert not re.search(r"\.\s+[A-Z]", caption), caption
        assert figure.count("<svg") == 1
        assert figure.count("<path") + figure.count("<use") > 3


def test_axes_carry_their_units(page):
    assert "test accuracy (%)" in page.text
    assert "test loss (cross-entropy, nats)" in page.text
    assert "peak memory of one device (bytes)" in page.text
    assert "weights kept (%)" in page.text
    assert "FLOPs of all devices so far" in page.text
    assert "bytes of all devices so far, up and down" in page.text


def test_accuracies_are_named_in_words_and_the_engine_is_said_for_every_arm(page):
    for words in ("after the last round", "mean of the last 5 evaluations", "highest of all evaluations"):
        assert words in page.text
    assert "last_mean" not in page.text
    assert page.text.count("engine: difference") == 2
    assert "engine difference difference backprop" in page.text


def test_letters_are_in_the_theme_and_not_fixed_to_light_paper(report):
    text = report.read_text(encoding="utf-8")
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert "var(--ink)" in drawings
    assert "var(--method-fedavg)" in drawings
    assert re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", drawings) == []


def test_a_broken_partition_picture_is_one_clear_error(tmp_path):
    run = write_run(tmp_path / "run", rounds=5)
    (run / "figures").mkdir()
    (run / "figures" / "partition.svg").write_text("<svg")
    with pytest.raises(RunFolderError, match=r"partition\.svg: damaged"):
        write_report([run], tmp_path / "out")


def test_a_diverged_arm_is_drawn_and_named(tmp_path):
    good, bad = write_run(tmp_path / "good", "fedavg", rounds=20), write_run(tmp_path / "bad", "baffle", rounds=20)
    edit_metrics(bad, loss=lambda row: float("nan") if row["round"] > 10 else 1e4)
    page = Page(write_report([good, bad], tmp_path / "out").read_text(encoding="utf-8"))
    assert "baffle diverged (no finite loss at the end)" in page.text


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    run = write_run(tmp_path / "run", rounds=5)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ReportError, match="choose another folder"):
        write_report([run], tmp_path / "file")


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory):
    root = tmp_path_factory.mktemp("engines")
    runs = [write_run(root / e, "baffle", engine=e, rounds=10) for e in ("exact", "difference")]
    return Page(write_report(runs, root / "out").read_text(encoding="utf-8"))


def test_both_engines_are_explained_where_both_were_used(two_engines):
    assert "Engine exact : the simulator computes" in two_engines.text
    assert "Engine difference : devices without backpropagation probe finite differences" in two_engines.text


def test_what_differs_between_arms_is_listed_and_nothing_else(two_engines):
    names = "baffle (exact) baffle (difference)"
    table = f'and in no others. {names} engine "exact" "difference" baffle (exact) config.toml'
    assert table in two_engines.text


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A run with a wicked name, no test losses, and a pruner that works on the devices."""
    root = tmp_path_factory.mktemp("odd")
    run = write_run(root / "run", rounds=5, name="<script>alert(1)</script> & co", pruner="ntk-ori")
    edit_metrics(run, loss=lambda row: None)
    edit_summary(
        run,
        pruning={"pruner": "ntk-ori", "seconds": 90, "device_bytes_up": 12_355_000, "device_bytes_down": 0,
                 "device_flops": 3.2e9, "bp_free": False},
    )  # fmt: skip
    return write_report([run], root / "out")


def test_names_from_a_run_cannot_become_markup(odd):
    page = Page(odd.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "<script>alert(1)</script> & co" in page.text


def test_a_run_without_test_losses_has_no_figure_of_them(odd):
    assert "Test loss" not in Page(odd.read_text(encoding="utf-8")).text
    assert not (odd.parent / "figures" / "loss_rounds.svg").exists()


def test_the_cost_of_pruning_is_told_per_arm(odd):
    text = Page(odd.read_text(encoding="utf-8")).text
    assert "ntk-ori 1.5 min 3.20 GFLOP 12.4 MB nothing needed" in text


def test_a_dense_run_of_an_unknown_method_with_one_evaluation_and_one_device_is_reported(tmp_path):
    run = write_run(tmp_path / "run", "of-tomorrow", rounds=3, eval_every=10, process=False, devices=1)
    page = Page(write_report([run], tmp_path / "out").read_text(encoding="utf-8"))
    assert "What pruning cost" not in page.text
    assert "through the dense network" in page.text
    assert "weights kept (%)" not in page.text
    assert "1 device, 3 rounds" in page.text


def test_a_run_is_reported_into_its_own_folder_with_the_partition_that_it_drew(single, single_report):
    page = Page(single_report.read_text(encoding="utf-8"))
    assert single_report == single / "report.html"
    assert "mine" in page.words
    assert (single / "figures" / "partition.svg").read_text() == PARTITION
    assert not (single / "figures" / "device_sizes.svg").exists()
    assert "averaged weights (EMA)" in page.text


def test_a_run_on_real_devices_shows_the_sizes_that_they_stated_and_no_picture(single, tmp_path):
    served = write_run(tmp_path / "served", rounds=10, stated=True)
    page = Page(write_report([served], tmp_path / "out").read_text(encoding="utf-8"))
    assert re.search(r"on 20 devices, \d+ to \d+ on each, as they said when they answered\.", page.text)
    assert "Who holds what" not in page.text
    assert not list((tmp_path / "out" / "figures").glob("partition*"))
    # Beside the simulation of the same shares, each keeps what it knows.
    page = Page(write_report([served, single], tmp_path / "both").read_text(encoding="utf-8"))
    assert "Samples of each device" in page.text
    assert "Who holds what" in page.text


def test_a_picture_from_a_run_brings_no_script_and_loads_nothing(single_report):
    page = Page(single_report.read_text(encoding="utf-8"))
    assert "partition-a" in page.ids
    assert "#partition-a" in page.references
    assert not any("example.org" in reference for reference in page.references)
    assert not {"script", "metadata"} & set(page.tags)


def test_a_report_elsewhere_says_the_same_and_brings_the_partition_along(single, single_report, tmp_path):
    elsewhere = write_report([single], tmp_path)
    assert elsewhere.read_bytes() == single_report.read_bytes()
    for path in (single / "figures").iterdir():
        assert path.read_bytes() == (tmp_path / "figures" / path.name).read_bytes()

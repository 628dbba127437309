"""Run folders and one finished report that several tests look at."""

from pathlib import Path

import pytest

from foreseed.report import write_report
from tests.report.runs import write_run

SEEDS = (0, 1, 2)
METHODS = ("ntk-baffle", "baffle", "fedavg")
PARTITION = (
    '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'viewBox="0 0 9 9" width="9pt" onload="x()"><script>x()</script><metadata>who</metadata>'
    '<path id="a" d="M0 0"/><use xlink:href="#a"/><image href="http://example.org/x.png"/><text>mine</text></svg>'
)
"""A picture as a run may have drawn it, with things that no page should take over."""


@pytest.fixture(scope="session")
def compared(tmp_path_factory) -> list[Path]:
    """Three methods with three seeds each."""
    root = tmp_path_factory.mktemp("compared")
    return [write_run(root / f"{m}-{s}", m, s, name=f"{m}-seed{s}") for m in METHODS for s in SEEDS]


@pytest.fixture(scope="session")
def report(compared, tmp_path_factory) -> Path:
    """The page about them."""
    return write_report(compared, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def single(tmp_path_factory) -> Path:
    """One run that drew its partition and averaged its weights."""
    run = write_run(tmp_path_factory.mktemp("single") / "run", ema=True, rounds=10)
    (run / "figures").mkdir()
    (run / "figures" / "partition.svg").write_text(PARTITION)
    (run / "figures" / "partition.csv").write_text("device,samples\n0,5\n")
    return run


@pytest.fixture(scope="session")
def single_report(single) -> Path:
    """The page about it, in its own folder."""
    return write_report([single], single)

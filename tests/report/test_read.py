"""The runs of a report: at least one, and each counts once."""

import pytest

from foreseed.engine.errors import ForeseedError
from foreseed.report import ReportError, console_table, summary_table, write_report
from tests.report.runs import write_run


def test_no_run_at_all_is_refused_by_every_entrance(tmp_path):
    for call in (summary_table, console_table, lambda runs: write_report(runs, tmp_path)):
        with pytest.raises(ReportError, match="no run folder was given"):
            call([])
    assert issubclass(ReportError, ForeseedError)


def test_a_folder_given_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "run", rounds=5)
    (row,) = summary_table([run, run.parent / "." / run.name])
    assert row.seeds == (0,)

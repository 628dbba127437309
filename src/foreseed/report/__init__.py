"""Reports on finished runs: one page with its figures, and the same numbers as rows or as a table on the terminal."""

from foreseed.report.last_words import Closing as Closing
from foreseed.report.last_words import closing as closing
from foreseed.report.page import write_report as write_report
from foreseed.report.read import ReportError as ReportError
from foreseed.report.table import SummaryRow as SummaryRow
from foreseed.report.table import console_table as console_table
from foreseed.report.table import summary_table as summary_table

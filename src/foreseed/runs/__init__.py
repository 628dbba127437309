"""Runs: the loop, the folder, checkpoints, and the typed records that everybody reads."""

from foreseed.runs.folder import Run as Run
from foreseed.runs.folder import RunError as RunError
from foreseed.runs.folder import RunFolderError as RunFolderError
from foreseed.runs.folder import is_finished as is_finished
from foreseed.runs.folder import read_run as read_run
from foreseed.runs.folder import rows_so_far as rows_so_far
from foreseed.runs.kept import Kept as Kept
from foreseed.runs.lease import Lease as Lease
from foreseed.runs.lease import LeaseError as LeaseError
from foreseed.runs.loop import Progress as Progress
from foreseed.runs.loop import Watch as Watch
from foreseed.runs.loop import prune_watch as prune_watch
from foreseed.runs.loop import run as run
from foreseed.runs.mending import asked as asked
from foreseed.runs.mending import changes_of as changes_of
from foreseed.runs.mending import described as described
from foreseed.runs.mending import times_gone_back as times_gone_back
from foreseed.runs.records import Change as Change
from foreseed.runs.records import Row as Row
from foreseed.runs.records import Summary as Summary
from foreseed.runs.trackers import Tracker as Tracker
from foreseed.runs.trackers import enter_tracker as enter_tracker

"""What a user sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from foreseed.runs import Progress as RunProgress


class Watcher:
    """Shows the progress of one run; call it as the run's `watch`."""

    def __init__(self, console: Console, quiet: bool = False, first: Sequence[str] = ()) -> None:
        """`first` are lines to say as soon as there is progress: a run that is refused is not announced."""
        self.console, self.quiet, self._first = console, quiet, list(first)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._began = (0.0, 0)
        self._bytes = 0

    def __enter__(self) -> Watcher:
        if self.console.is_terminal and not self.quiet:
            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(), console=self.console,
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: RunProgress) -> None:
        if self.quiet:
            return
        while self._first:
            self.console.print(self._first.pop(0), soft_wrap=True, markup=False, highlight=False)
        if progress.stage == "train" and progress.row is None:  # nothing but a word before the first round
            self._note(progress)
            return
        said = self._said(progress)
        if self._live is not None:
            if progress.stage != self._stage:
                name = f"{progress.config.run_name} {'pruning' if progress.stage == 'prune' else 'round'}"
                self._task = self._live.add_task(name, total=progress.total, said="")
            assert self._task is not None
            self._live.update(self._task, completed=progress.done, said=said)
        elif progress.done == progress.total or (progress.row is not None and progress.row.accuracy is not None):
            self.console.print(
                f"{progress.config.run_name}: {progress.stage} {progress.done}/{progress.total}{said}", soft_wrap=True
            )
        if progress.note:
            self._note(progress)
        self._stage = progress.stage

    def _note(self, progress: RunProgress) -> None:
        self.console.print(f"{progress.config.run_name}: {progress.note}", soft_wrap=True)

    def _said(self, progress: RunProgress) -> str:
        row = progress.row
        if row is None:
            return ""
        if self._stage != "train":
            self._began, self._bytes = (time.monotonic() - row.seconds, progress.done - 1), 0
        self._bytes += row.bytes_up + row.bytes_down
        rate = (progress.done - self._began[1]) / max(time.monotonic() - self._began[0], 1e-9)
        accuracy = "" if progress.accuracy is None else f"  accuracy {100 * progress.accuracy:.2f} %"
        return f"{accuracy}  loss {row.train_loss:.3f}  {rate:.1f} rounds/s  {self._bytes / 1e6:.1f} MB"

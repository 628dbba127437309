"""The `foreseed` command: its subcommands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from foreseed import __version__
from foreseed.cli import bench, data, experiment, runs, serve, trained
from foreseed.cli.doctor import doctor
from foreseed.cli.fleet import fleet_app
from foreseed.cli.init import init
from foreseed.cli.reproduce import reproduce
from foreseed.cli.sweep import sweep
from foreseed.engine.errors import ForeseedError

app = typer.Typer(
    name="foreseed",
    help="Federated learning for devices too small for backpropagation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(init)
app.command()(experiment.run)
app.command()(experiment.compare)
app.command()(sweep)
app.command()(reproduce)
app.command()(experiment.prune)
app.command()(experiment.report)
app.command()(trained.export)
app.command()(trained.predict)
app.command()(trained.evaluate)
app.command()(runs.runs)
app.command()(serve.serve)
app.command("testbed")(serve.run_testbed)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
app.add_typer(fleet_app, name="fleet")
app.command()(doctor)

# typer names only this kind of what it raises for a wrong option or command; all the others have the same base.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_MISTAKE, _STOPPED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `foreseed` and give its exit code: 0 on success, 2 after one line on standard error for a user's mistake.

    130 after Ctrl-C or SIGTERM.
    """
    try:
        with _stopped_by_sigterm():
            result = app(None if arguments is None else list(arguments), prog_name="foreseed", standalone_mode=False)
    except (ForeseedError, _UsageError) as error:
        return _complain(error)
    except typer.Abort:
        result = _STOPPED
    if result == _STOPPED:
        print("foreseed: stopped; run, compare and serve go on where they were with --resume", file=sys.stderr)
    return result if isinstance(result, int) else 0


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: what a command has started, such as a broker and devices, ends with it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    message: str = getattr(error, "format_message", error.__str__)()
    hint = "" if context is None else f" (see {context.command_path} --help)"
    if message:  # a command without its subcommand has shown its help, and has nothing to add
        print(f"foreseed: {' '.join(message.split())}{hint}", file=sys.stderr)
    return _MISTAKE


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foreseed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass

"""The command line's manners: exit codes, one clear line for a mistake, results on standard output."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foreseed import __version__
from foreseed.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"foreseed {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "engine", "--cases", "lenet5-9"], "did you mean 'lenet5-90'?"),
        (["bench", "engine", "--threads", "none"], "threads 'none': expected numbers from 1 to"),
        (["bench", "engine", "--seconds", "-1"], "seconds -1.0: expected a positive number"),
        (["bench", "engine", "--seconds", "soon"], "Invalid value for '--seconds'"),
        (["bench", "engine", "--nonsense"], "No such option: --nonsense"),
        (["bnch"], "No such command 'bnch'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("foreseed: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_wrong_option_points_to_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--nonsense"]) == 2
    assert "(see foreseed bench engine --help)" in capsys.readouterr().err


def test_a_real_process_shows_no_traceback() -> None:
    command = [sys.executable, "-m", "foreseed.cli", "bench", "engine", "--cases", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("foreseed: case 'nonsense': expected one of lenet5-dense")
    assert done.stderr.count("\n") == 1


def test_a_command_without_its_subcommand_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    captured = capsys.readouterr()
    assert "engine" in captured.out + captured.err
    assert "memory" in captured.out + captured.err
    assert "foreseed: " not in captured.err


@pytest.mark.parametrize("command", [["bench", "engine"], ["bench", "memory"], ["doctor"]])
def test_help_shows_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert f"Example: foreseed {' '.join(command)}" in capsys.readouterr().out

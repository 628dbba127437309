"""What docs/deploy.md and deploy/ tell a user to type and to expect is what the programs take and say.

`tests/test_install.py` runs every command of the page.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest

from foreseed.cli import main
from foreseed.device import agent

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
UNIT = ROOT / "deploy" / "foreseed-device.service"
CONF = ROOT / "deploy" / "device.conf"

SHELL = "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```", PAGE)).splitlines()
SERVER_COMMANDS = [line for line in SHELL if line.startswith("foreseed ")]
DEVICE_COMMANDS = [line.partition("foreseed-device ")[2] for line in SHELL if "bin/foreseed-device " in line]
ARGUMENTS = re.findall(r'(?m)^#?ARGUMENTS="(.*)"$', CONF.read_text())
MESSAGES = [
    message
    for row in re.findall(r"(?m)^\| (`.*?) \|", PAGE.partition("| it says |")[2].partition("\n## ")[0])
    if "(the broker)" not in row
    for message in re.findall(r"`(.*?)`", row)
]


@pytest.mark.parametrize("command", SERVER_COMMANDS)
def test_every_option_of_a_server_command_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    nested = words[0] in ("fleet", "data")
    assert main([*words[: 2 if nested else 1], "--help"]) == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("arguments", [*DEVICE_COMMANDS, *ARGUMENTS])
def test_a_device_takes_the_arguments_that_it_is_given(arguments: str) -> None:
    # At spaces alone, as systemd does.
    options = agent._parser().parse_args(arguments.split(" "))
    assert options.broker.startswith("mqtts://broker.example.org")
    assert (options.cert and options.key) or (options.user and options.password_file)


def test_the_page_was_read() -> None:
    """The tests above and below are about something."""
    assert len(SERVER_COMMANDS) >= 4
    assert len(DEVICE_COMMANDS) == 1
    assert len(ARGUMENTS) == 2
    assert len(MESSAGES) >= 14


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_in_the_table_is_one_that_is_said(message: str) -> None:
    sources = [
        path.read_text()
        for room in ("device", "fleet", "transport")
        for path in (ROOT / "src" / "foreseed" / room).rglob("*.py")
    ]
    assert any(message in source for source in sources)


def test_the_unit_starts_what_is_installed_and_rests_after_a_mistake() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    program, arguments = unit["Service"]["ExecStart"].split()
    assert Path(program).name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert arguments == "$ARGUMENTS"
    assert unit["Service"]["EnvironmentFile"] == "/etc/foreseed/device.conf"
    # What argparse gives for a command that it does not understand is what the unit takes for a mistake.
    assert agent.main(["--nonsense"]) == int(unit["Service"]["RestartPreventExitStatus"])
    # The state file lies where the unit may write: the working folder, by default.
    assert unit["Service"]["WorkingDirectory"] == f"/var/lib/{unit['Service']['StateDirectory']}"

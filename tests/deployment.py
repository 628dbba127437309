"""A machine to follow docs/deploy.md on: the page's commands run as they stand, below a folder instead of at the root.

Real are the wheel that is installed, the programs, the broker and all files. Stand-ins are there for what would change
this machine: `apt`, `useradd`, `systemctl` and `journalctl` only say that they were called, `sudo` and `install` leave
users out. What systemd would start, a test starts by the files that were installed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from foreseed.fleet.local import free_ports

ROOT = Path(__file__).parents[1]
PATIENCE = 300.0
"""Seconds after which a test gives up waiting; what it waits for takes moments."""

_DEVICE_NEEDS = ("cffi", "_cffi_backend", "cbor2", "_cbor2", "paho", "pycparser")
_STAND_INS = {
    "sudo": '[ "$1" = -u ] && shift 2; exec "$@"',
    "install": 'for a; do shift; case $a in -o|-g) drop=1;; *) [ "$drop" ] || set -- "$@" "$a"; drop=;; esac; done; '
    'exec /usr/bin/install "$@"',
    **{name: f'echo "called {name} $*"' for name in ("apt", "useradd", "systemctl", "journalctl")},
    # A new environment finds here what pip would have to download, also where it brings an older one (setuptools).
    "python3": '"$TEST_PYTHON" "$@" || exit; [ "$2" = venv ] || exit 0; cd "$3"/lib/python3*/site-packages; '
    'rm -rf setuptools*; echo "$MACHINE/packages/$(basename "$(dirname "$3")")" > shared.pth',
}


def commands(page: str) -> list[str]:
    """Every command that a page shows in its blocks of shell."""
    return "".join(re.findall(r"(?ms)^```sh\n(.*?)^```", (ROOT / "docs" / page).read_text())).splitlines()


class Process:
    """A program that goes on until it is stopped."""

    def __init__(self, command: list[str | Path] | str, log: Path, **options: object) -> None:
        self._log = log
        with open(log, "ab") as file:
            self._process = subprocess.Popen(  # type: ignore[call-overload]
                command, shell=isinstance(command, str), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True, **options,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until(self, is_so: Callable[[], object]) -> None:
        """Wait for something that this program must bring about."""
        end = time.monotonic() + PATIENCE
        while not is_so():
            assert self._process.poll() is None, f"it ended: {self.said[-2000:]}"
            assert time.monotonic() < end, f"in vain: {self.said[-2000:]}"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self._process.poll() is None:
            self.signal(signal.SIGINT)
            try:
                self._process.wait(PATIENCE)
            finally:
                if self._process.poll() is None:
                    self.signal(signal.SIGKILL)


class Machine:
    """Server, broker and board in one folder; `left` are the page's commands that have not run yet."""

    def __init__(self, folder: Path, wheels: Path, page: str) -> None:
        self.folder, self.left = folder, commands(page)
        self.home, self.board = folder / "home", folder / "board"
        for place in ("home", "board", "bin", "log", "opt", "etc/mosquitto/conf.d", "etc/systemd/system", "var/lib"):
            (folder / place).mkdir(parents=True)
        for name, code in _STAND_INS.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\n{code}\n")
            (folder / "bin" / name).chmod(0o755)
        self._share_packages("home", lambda name: not name.startswith(("foreseed", "__editable__")))
        self._share_packages("opt", lambda name: name.startswith(_DEVICE_NEEDS))
        self.ports = free_ports(2)
        path = f"{folder / 'bin'}:{self.home / 'foreseed' / 'bin'}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._environment = kept | {
            "HOME": str(self.home), "PATH": path, "MACHINE": str(folder), "TEST_PYTHON": sys.executable,
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "FORESEED_DATA": str(folder / "data"), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self._running: list[Process] = []

    def _share_packages(self, who: str, wanted: Callable[[str], bool]) -> None:
        shared = self.folder / "packages" / who
        shared.mkdir(parents=True)
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if wanted(entry.name) and entry.suffix != ".pth":
                (shared / entry.name).symlink_to(entry)

    def here(self, text: str) -> str:
        """A command or a file of the page, with this machine's folder, host and ports."""
        text = re.sub(r"(?<![\w.])/(?=(opt|etc|var/lib)/)", f"{self.folder}/", text)
        hosts = r"(?:broker\.example\.org|localhost)"
        text = re.sub(rf"(mqtts://){hosts}:8884", rf"\1localhost:{self.ports[1]}", text)
        text = re.sub(rf"(mqtts://){hosts}(?!:)", rf"\1localhost:{self.ports[0]}", text)
        text = text.replace("-h broker.example.org -p 8883", f"-h localhost -p {self.ports[0]}")
        return text.replace("broker.example.org", "localhost")

    def take(self, first: str, count: int = 1) -> str:
        """The command that begins like this, and those after it; each can be taken once."""
        at = next(number for number, line in enumerate(self.left) if line.startswith(first))
        taken, self.left[at : at + count] = self.left[at : at + count], []
        return "\n".join(map(self.here, taken))

    def run(self, script: str, cwd: Path | None = None) -> str:
        """What the commands print; all must succeed."""
        done = subprocess.run(
            ["sh", "-e", "-c", script], capture_output=True, text=True, check=False, cwd=cwd or self.home,
            env=self._environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def start(self, script: str, name: str, cwd: Path | None = None) -> Process:
        """Start commands that go on; `name` is that of their log."""
        log = self.folder / "log" / name
        self._running.append(Process(script, log, cwd=cwd or self.home, env=self._environment))
        return self._running[-1]

    def start_broker(self, config: Path, name: str, script: str) -> Process:
        """Start mosquitto by a configuration, on this machine's ports."""
        text = self.here(config.read_text()).replace("user mosquitto\n", "user root\n")
        for shipped, port in zip((8883, 8884), self.ports, strict=True):
            text, changed = re.subn(rf"(?m)^listener {shipped}$", f"listener {port}", text)
            assert changed == 1
        config.write_text(text)
        broker = self.start(script, name)
        broker.wait_until(lambda: self.lets_in("server"))
        return broker

    def lets_in(self, name: str) -> bool:
        """Whether the broker knows someone by the password that was made for them."""
        password = (self.home / "keys" / f"{name}.password").read_text().strip()
        who = ["-u", name, "-P", password, "--cafile", str(self.home / "keys" / "ca.crt")]
        ask = ["mosquitto_sub", "-h", "localhost", "-p", str(self.ports[1]), *who, "-t", "foreseed/1/all", "-E"]
        return subprocess.run(ask, capture_output=True, check=False).returncode == 0

    def start_unit(self, name: str) -> Process:
        """Start what systemd would, by the unit and the arguments that were installed."""
        unit = (self.folder / "etc/systemd/system/foreseed-device.service").read_text()
        (program,) = re.findall(r"(?m)^ExecStart=(.*)$", unit)
        (file,) = re.findall(r"(?m)^EnvironmentFile=(.*)$", unit)
        (folder,) = re.findall(r"(?m)^WorkingDirectory=(.*)$", unit)
        (arguments,) = re.findall(r'(?m)^ARGUMENTS="(.*)"$', Path(self.here(file)).read_text())
        command = self.here(program.replace("$ARGUMENTS", arguments))
        return self.start(f"exec {command}", name, Path(self.here(folder)))

    def close(self) -> None:
        for process in reversed(self._running):
            process.stop()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rounds_in(folder: Path) -> int:
    """How many rounds a run has held."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0

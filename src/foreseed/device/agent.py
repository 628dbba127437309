"""`foreseed-device`: a device in a real fleet. Standard library, engine, wire, transport, paho-mqtt and cbor2 only."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from foreseed import __version__
from foreseed.device import state
from foreseed.device.member import Member
from foreseed.device.memory import peak_bytes
from foreseed.device.session import Session
from foreseed.engine.errors import ForeseedError
from foreseed.transport.link import broker
from foreseed.transport.loop import Loop
from foreseed.wire import ANY_NUMBER, NAMES, NOTHING_HELD, Ready, Reply, encode, is_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from foreseed.wire import Ack, Message, Welcome

_FAILURE, _MISTAKE = 1, 2
_EXAMPLE = """\
example: one of the devices that `foreseed fleet keys` made credentials for
  foreseed-device --broker mqtts://broker.example:8883 --name kitchen --shard kitchen.bin \\
      --ca ca.crt --cert kitchen.crt --key kitchen.key --memory-budget 512K
"""


class AgentError(ForeseedError):
    """A device that cannot be started as asked, or, started for one run, cannot take part in it."""


class Agent:
    """A device's process, from its start to its end: it saves its state, and tells its user what happens."""

    def __init__(self, options: argparse.Namespace) -> None:
        _check(options)
        self._options = options
        self._broker = broker(
            options.broker, ca=options.ca, cert=options.cert, key=options.key, user=options.user,
            password_file=options.password_file, insecure=options.insecure,
        )  # fmt: skip
        saved = state.load(options.state, _say)
        self._saved = None if saved is None else (saved.run, saved.program_hash, saved.round)
        self._unsaved = 0
        """Rounds answered since then."""
        self._reported: Welcome | None = None
        """The place in a run that was said last."""
        self._rejection = ""
        """Why this device takes no part, as it was said last, until it is ready."""
        self._loop = Loop()
        self._member = Member(
            options.shard, wanted=options.number, memory_budget=options.memory_budget, saved=saved, say=_say,
            costs=lambda: (peak_bytes() // 1024, *self._session.traffic),
        )  # fmt: skip
        self._seen: tuple[bool, Ack | None] = False, None
        """Whether the run is finished, and the last ack, when a message arrived last."""
        self._session = Session(options.name, self._member, self._received, self._worked)

    def run(self) -> None:
        """Take part until stopped, or until the run is finished if that was asked for."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._loop.stop())
        self._session.connect(self._loop, self._broker, _say)
        try:
            self._loop.run(lambda: self._options.once and self._member.finished)
        finally:
            if self._member.held != NOTHING_HELD:
                self._save()
            self._session.close()

    def _received(self, messages: Sequence[Message]) -> None:
        member, (was_finished, last_ack) = self._member, self._seen
        self._seen = member.finished, member.last_ack
        if member.rejection is not None:
            self._reject(member.rejection)
        if member.finished and not was_finished:
            self._report("the run is finished")
        if member.last_ack is not None and member.last_ack is not last_ack and member.last_ack.refused:
            self._report(f"round {member.last_ack.round}: the answer does not count: {member.last_ack.refused}")
        if any(isinstance(message, Ready) for message in messages):
            self._on_ready()

    def _worked(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Reply):
                size = len(encode(message))
                self._report(f"round {message.round}: answered in {message.compute_ms} ms, {size} bytes")
                self._unsaved += 1
        if self._unsaved >= self._options.save_every:
            self._save()

    def _reject(self, reason: str) -> None:
        """Wait for a server that starts anew: the mistake may be on its side, and nobody comes to restart a board."""
        if self._options.once:
            raise AgentError(reason)
        if reason != self._rejection:
            self._reported, self._rejection = None, reason
            _say(f"{reason}; waiting for the server to start anew")

    def _on_ready(self) -> None:
        member, saved, self._rejection = self._member, self._saved, ""
        assert member.welcome is not None
        assert member.worker is not None
        if saved is None or saved[:2] != (member.welcome.run, member.welcome.program_hash):
            self._save()
        if member.welcome == self._reported:
            return
        self._reported = member.welcome
        self._report(
            f"run {member.welcome.run.hex()}: ready as device {member.welcome.device}, "
            f"{member.worker.engine.planned_bytes} bytes planned for {member.worker.engine.batch} images at once"
        )

    def _save(self) -> None:
        current = self._member.state
        now = None if current is None else (current.run, current.program_hash, current.round)
        if current is None or now == self._saved:
            return
        try:
            state.save(self._options.state, current)
        except OSError as error:
            _say(f"{self._options.state}: cannot save the state ({error.strerror}); going on without")
        self._saved, self._unsaved = now, 0

    def _report(self, line: str) -> None:
        if not self._options.quiet:
            _say(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `foreseed-device`; returns 0, or after one line on standard error 2, or 1 where another try may help."""
    try:
        Agent(_parser().parse_args(arguments)).run()
    except ForeseedError as error:
        print(f"foreseed-device: {error}", file=sys.stderr)
        return _MISTAKE
    except MemoryError:
        print("foreseed-device: out of memory; give a --memory-budget that is there, or more memory", file=sys.stderr)
        return _FAILURE
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AgentError(f"{message} (see foreseed-device --help)")


def _parser() -> _Parser:
    parser = _Parser(
        "foreseed-device",
        description="Take part in a run of a foreseed server, with this device's own images.",
        epilog=_EXAMPLE,
        # With a width, argparse does not load what would measure the terminal: 0.7 MB.
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--broker",
        required=True,
        metavar="URL",
        help="mqtts://host[:8883], or mqtt:// without TLS; a,b,c for any of several",
    )
    add("--name", required=True, help="this device's name, which the broker knows it by")
    add("--shard", required=True, metavar="FILE", help="its images, as `foreseed data` writes them")
    add("--number", type=_number, default=ANY_NUMBER, metavar="N", help="its number in the run; any, if not given")
    add("--state", metavar="FILE", help="what it keeps over a restart; NAME.state here, if not given")
    add(
        "--save-every",
        type=_positive,
        default=10,
        metavar="N",
        help="save that after N answers (10), to spare flash",
    )
    add("--memory-budget", type=_bytes, metavar="BYTES", help="such as 512K or 2M; the interpreter comes on top")
    add("--ca", default="", metavar="FILE", help="the authority behind the broker's certificate; the system's, if none")
    add("--cert", default="", metavar="FILE", help="this device's certificate")
    add("--key", default="", metavar="FILE", help="the key of that certificate")
    add("--user", default="", help="a user name instead of a certificate")
    add("--password-file", default="", metavar="FILE", help="the password of that user")
    add("--insecure", action="store_true", help="allow mqtt://, all in plain text, to another host")
    add("--once", action="store_true", help="end when the run is finished; otherwise wait for the next")
    add("--quiet", action="store_true", help="say nothing of rounds that go well")
    add("--version", action="version", version=f"foreseed {__version__}")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Find mistakes before anybody is bothered with them."""
    if not is_name(options.name):
        raise AgentError(f"--name {options.name!r}: expected {NAMES}")
    if options.user and options.user != options.name:
        raise AgentError(
            f"--user {options.user!r} is not --name {options.name!r}: a broker lets a user write under its own name "
            "only; give both the same"
        )
    try:
        with open(options.shard, "rb") as file:
            file.read(1)
    except OSError as error:
        raise AgentError(f"{options.shard}: cannot read the shard ({error.strerror}); check --shard") from None
    options.state = options.state or f"{options.name}.state"
    folder = os.path.dirname(options.state) or "."
    if not os.path.isdir(folder):
        raise AgentError(f"{options.state}: {folder} is no folder; make it, or check --state")


def _number(text: str, least: int = 0) -> int:
    if not text.isdecimal() or not least <= int(text) < 0xFFFFFFFF:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a number from {least} on")
    return int(text)


def _positive(text: str) -> int:
    return _number(text, 1)


def _bytes(text: str) -> int:
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in ("K", "M") else (text, "")
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} given, expected bytes such as 65536, 64K or 2M")
    return int(digits) * {"": 1, "K": 1 << 10, "M": 1 << 20}[unit]


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

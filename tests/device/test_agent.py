"""`foreseed-device` as a process, with a real mosquitto: it takes part, comes back, ends cleanly, and says why not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foreseed import __version__
from foreseed.bench.cases import make_case
from foreseed.device import agent
from foreseed.device.member import Member
from foreseed.device.state import load
from foreseed.engine import Program
from foreseed.fleet.keys import SERVER, Identity, make_keys
from foreseed.methods.ntk_baffle import learn
from foreseed.transport import loop, topics
from foreseed.transport.link import LinkError, Publication, broker
from foreseed.transport.loop import Loop
from foreseed.wire import Fetch, Join, Leave, Message, Presence, Ready, Reply, decode, encode
from tests.device.scripted import RUN, Server, ask, join, small_coordinator, small_program, write_shard
from tests.fleet.broker import Mosquitto, free_ports

PATIENCE = 300.0
"""Seconds after which a test gives up waiting; what it waits for takes moments."""
NAME = "kitchen"
COMMAND = [sys.executable, "-m", "foreseed.device.agent"]
PROGRAM = small_program()


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[Mosquitto]:
    with Mosquitto.plain() as running:
        yield running


class Device:
    """A `foreseed-device` process, and what it said."""

    def __init__(self, folder: Path, url: str, *options: str) -> None:
        self.state = folder / "kitchen.state"
        shard = folder / "shard.bin"
        if not shard.exists():
            write_shard(shard)
        self._output = folder / "said"
        command = [*COMMAND, "--broker", url, "--name", NAME, "--shard", "shard.bin"]
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen([*command, *options], cwd=folder, stdout=output, stderr=subprocess.PIPE)

    @property
    def said(self) -> str:
        return self._output.read_text()

    def end(self) -> tuple[int, str]:
        """Wait for the process; its exit code and what it complained about."""
        complaint = self.process.communicate(timeout=PATIENCE)[1].decode()
        return self.process.returncode, complaint

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class LiveServer:
    """The scripted server behind a link; it hears and answers while a test waits for something."""

    def __init__(self, url: str, program: Program = PROGRAM, **credentials: str) -> None:
        self.server = Server(small_coordinator(program), program)
        self.presence: Presence | None = None
        self.instance = ""
        self._loop = Loop()
        self._link = self._loop.connect(
            self, broker(url, **credentials), "server", [topics.EVERY_HERE, topics.EVERY_UP], lambda line: None
        )

    @property
    def heard(self) -> list[Message]:
        return self.server.heard

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    def announce(self, finished: bool = False) -> None:
        self._link.publish(topics.ALL, encode(self.server.announce(finished)), retain=True)

    def tell(self, message: Message) -> None:
        self._link.publish(topics.down(NAME, self.instance), encode(message))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"what was waited for did not come; heard {self.heard}"
            self._loop.deliver(0.02)

    def connected(self) -> list[Publication]:
        return [(topics.ALL, encode(self.server.announce()), True)]

    def receive(self, topic: str, payload: bytes) -> list[Publication]:
        name, instance = topics.sender(topic)
        assert name == NAME
        message = decode(payload)
        if isinstance(message, Presence):
            self.presence = message
            return []
        self.instance = instance
        return [(topics.down(NAME, instance), encode(answer), False) for answer in self.server.take(message)]

    def work(self) -> list[Publication]:
        return []

    def until_ready(self) -> Ready:
        """Wait until the device is ready once more, by any path; returns what it said."""
        before = self.count(Ready)
        self.until(lambda: self.count(Ready) > before)
        return [message for message in self.heard if isinstance(message, Ready)][-1]

    def hold_rounds(self, count: int = 1) -> Reply:
        """Rounds that the device answers; returns its last reply."""
        for _ in range(count):
            order = self.server.order()
            self.tell(order)
            self.until(lambda: bool(self.server.coordinator.replies))
            (reply,) = self.server.coordinator.replies
            learn(self.server.coordinator)
        return reply

    def close(self) -> None:
        # What is retained would greet the next test's device.
        last = ((topics.ALL, b"", True), (topics.here(NAME), b"", True))
        self._link.stop(*last)


@pytest.fixture
def server(mosquitto: Mosquitto) -> Iterator[LiveServer]:
    running = LiveServer(mosquitto.url)
    yield running
    running.close()


# --- taking part ---


def test_a_device_joins_answers_and_ends_with_the_run(mosquitto: Mosquitto, server: LiveServer, tmp_path: Path) -> None:
    with Device(tmp_path, mosquitto.url, "--number", "1", "--once") as device:
        ready = server.until_ready()
        assert ready == Ready(RUN, -1, 12)
        assert server.heard[0] == Join(1)
        server.until(lambda: server.presence is not None)
        assert server.presence == Presence(bytes.fromhex(server.instance), True)
        reply = server.hold_rounds(3)
        server.announce(finished=True)
        assert device.end() == (0, "")
    lines = device.said.splitlines()
    assert lines[0] == f"{mosquitto.url}: connected"
    assert lines[1].startswith(f"run {RUN.hex()}: ready as device 0, ")
    assert lines[4] == f"round 3: answered in {reply.compute_ms} ms, {len(encode(reply))} bytes"
    assert lines[5:] == ["the run is finished"]
    server.until(lambda: server.presence == Presence(bytes.fromhex(server.instance), False))


def test_its_replies_are_those_of_a_member_and_tell_what_they_cost(
    mosquitto: Mosquitto, server: LiveServer, tmp_path: Path
) -> None:
    with Device(tmp_path, mosquitto.url):
        server.until_ready()
        reply = server.hold_rounds()
    twin = Server(small_coordinator(PROGRAM), PROGRAM)
    member = Member(tmp_path / "shard.bin")
    join(twin, member)
    (same,) = [message for message in ask(twin, member, twin.order()) if isinstance(message, Reply)]
    assert reply[:7] == same[:7]
    assert reply.peak_kib > 5000
    assert reply.sent > sum(len(encode(message)) for message in server.heard[:-1])
    assert reply.received > len(PROGRAM.bytes)


def test_sigterm_saves_the_state_and_says_goodbye(mosquitto: Mosquitto, server: LiveServer, tmp_path: Path) -> None:
    with Device(tmp_path, mosquitto.url) as device:
        server.until_ready()
        server.hold_rounds(3)
        kept = load(device.state, pytest.fail)
        assert kept is not None  # saved with the program, before any round
        assert (kept.program, kept.round) == (PROGRAM.bytes, -1)
        assert device.stop() == (0, "")
    server.until(lambda: server.presence == Presence(bytes.fromhex(server.instance), False))
    kept = load(device.state, pytest.fail)
    assert kept is not None
    assert (kept.run, kept.number, kept.round) == (RUN, 0, 2)


def test_a_restarted_device_needs_no_download(mosquitto: Mosquitto, server: LiveServer, tmp_path: Path) -> None:
    with Device(tmp_path, mosquitto.url) as device:
        server.until_ready()
        server.hold_rounds(2)
        device.stop()
    server.heard.clear()
    with Device(tmp_path, mosquitto.url):
        assert server.until_ready() == Ready(RUN, 1, 12)
        server.hold_rounds()
    assert server.count(Fetch) == 0


@pytest.mark.parametrize(("save_every", "round"), [("2", 3), ("3", 2), ("9", -1)])
def test_a_killed_device_has_the_state_of_its_last_save(
    mosquitto: Mosquitto, server: LiveServer, tmp_path: Path, save_every: str, round: int
) -> None:
    with Device(tmp_path, mosquitto.url, "--save-every", save_every) as device:
        server.until_ready()
        server.hold_rounds(5)
        device.process.kill()
        device.end()
    server.until(lambda: server.presence == Presence(bytes.fromhex(server.instance), False))  # its last will
    kept = load(device.state, pytest.fail)
    assert kept is not None
    assert kept.round == round


def test_a_damaged_state_is_said_and_fetched_again(mosquitto: Mosquitto, server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "kitchen.state").write_bytes(b"what is this?")
    with Device(tmp_path, mosquitto.url) as device:
        server.until_ready()
        server.hold_rounds()
        device.stop()
    assert device.said.startswith("kitchen.state: the state is damaged, or no state at all; ")
    assert load(device.state, pytest.fail) is not None


def test_a_server_that_starts_again_is_joined_again(mosquitto: Mosquitto, server: LiveServer, tmp_path: Path) -> None:
    with Device(tmp_path, mosquitto.url):
        server.until_ready()
        server.hold_rounds()
        server.presence = None
        server.server.epoch = b"epoch--2"
        server.announce()
        assert server.until_ready() == Ready(RUN, 0, 12)
        assert server.presence == Presence(bytes.fromhex(server.instance), True)
        server.hold_rounds()


def test_quiet_says_nothing_of_rounds_that_go_well(mosquitto: Mosquitto, server: LiveServer, tmp_path: Path) -> None:
    with Device(tmp_path, mosquitto.url, "--quiet") as device:
        server.until_ready()
        server.hold_rounds(2)
        device.stop()
    assert device.said == f"{mosquitto.url}: connected\n"


def test_a_device_survives_its_broker(tmp_path: Path) -> None:
    with Mosquitto.plain() as mosquitto, Device(tmp_path, mosquitto.url) as device:
        server = LiveServer(mosquitto.url)
        server.until_ready()
        server.hold_rounds()
        mosquitto.restart()
        server.until_ready()
        assert server.hold_rounds().round == 2
        mosquitto.kill()
        server.tell(server.server.order())  # lost with the broker
        mosquitto.start()
        server.until_ready()
        assert server.hold_rounds().round == 3
        assert device.stop() == (0, "")
        server.close()
    assert "the connection was lost; trying again" in device.said


def test_a_device_waits_for_a_broker_and_a_server_that_are_not_there_yet(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Device(tmp_path, f"mqtt://127.0.0.1:{port}") as device:
        end = time.monotonic() + PATIENCE
        while "it cannot be reached (Connection refused); trying again" not in device.said:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert device.process.poll() is None
        assert device.stop() == (0, "")


def test_a_device_with_tls_runs_lenet5_in_25_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("lenet5-90", images=100)
    (tmp_path / "shard.bin").write_bytes(case.samples.data)
    # As on a device, where modules were compiled when they were installed.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "compiled"))
    subprocess.run([*COMMAND, "--version"], check=True, stdout=subprocess.DEVNULL)
    make_keys(tmp_path / "keys", [NAME])
    mine, its = Identity(tmp_path / "keys", NAME), Identity(tmp_path / "keys", SERVER)
    options = [word for key in ("ca", "cert", "key") for word in (f"--{key}", str(getattr(mine, key)))]
    with Mosquitto.secure(tmp_path / "keys") as mosquitto, Device(tmp_path, mosquitto.tls_url, *options):
        server = LiveServer(mosquitto.tls_url, case.program, ca=str(its.ca), cert=str(its.cert), key=str(its.key))
        server.until_ready()
        reply = server.hold_rounds(3)
        server.close()
    assert reply.samples == 100
    assert 10e6 < 1024 * reply.peak_kib < 25e6


# --- ends that are not well ---


AWAY = "the server sent this device away: the run is full: it has 3 devices"


def test_a_device_that_is_sent_away_says_why_and_joins_the_next_server(
    mosquitto: Mosquitto, server: LiveServer, tmp_path: Path
) -> None:
    with Device(tmp_path, mosquitto.url) as device:
        server.until_ready()
        for _ in range(2):
            server.tell(Leave("the run is full: it has 3 devices"))
        server.until(lambda: AWAY in device.said)
        server.server.epoch = b"epoch--2"
        server.announce()
        server.until_ready()
        assert server.hold_rounds().round == 1
        assert device.stop() == (0, "")
    assert device.said.count(f"{AWAY}; waiting for the server to start anew\n") == 1
    assert device.said.count("ready as device 0") == 2


def test_a_device_for_one_run_that_is_sent_away_ends(mosquitto: Mosquitto, server: LiveServer, tmp_path: Path) -> None:
    with Device(tmp_path, mosquitto.url, "--once") as device:
        server.until_ready()
        server.tell(Leave("the run is full: it has 3 devices"))
        assert device.end() == (2, f"foreseed-device: {AWAY}\n")
    server.until(lambda: server.presence == Presence(bytes.fromhex(server.instance), False))


MISFITS = pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--shard", "other.bin"], "other.bin: 34 bytes are no whole number of records of 33 bytes"),
        (["--memory-budget", "100"], "the run needs at least 400 bytes here, the budget is 100"),
        (["--memory-budget", "1K"], "bytes here, the budget is 1024; raise --memory-budget, or prune further"),
    ],
)


@MISFITS
def test_what_only_the_program_shows_is_said_once_and_the_device_waits(
    mosquitto: Mosquitto, server: LiveServer, tmp_path: Path, options: list[str], complaint: str
) -> None:
    (tmp_path / "other.bin").write_bytes(bytes(34))
    with Device(tmp_path, mosquitto.url, *options) as device:
        server.until(lambda: complaint in device.said)
        for epoch in (b"epoch--2", b"epoch--3"):
            joins = server.count(Join)
            server.server.epoch = epoch
            server.announce()
            server.until(lambda joins=joins: server.count(Join) > joins)  # type: ignore[misc]
        assert device.stop() == (0, "")
    assert device.said.count(complaint) == 1


@MISFITS
def test_what_only_the_program_shows_ends_a_device_for_one_run_with_one_line(
    mosquitto: Mosquitto, server: LiveServer, tmp_path: Path, options: list[str], complaint: str
) -> None:
    (tmp_path / "other.bin").write_bytes(bytes(34))
    with Device(tmp_path, mosquitto.url, "--once", *options) as device:
        server.until(lambda: device.process.poll() is not None)
        code, said = device.end()
    assert code == 2
    assert said.startswith("foreseed-device: ")
    assert complaint in said
    assert said.count("\n") == 1


GOOD = {"--broker": "mqtts://127.0.0.1:9", "--name": NAME, "--shard": "shard.bin"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"--broker": None}, "the following arguments are required: --broker"),
        ({"--name": None}, "required: --name"),
        ({"--shard": None}, "required: --shard"),
        ({"--name": "-kitchen"}, "argument --name: expected one argument"),
        ({"--name": ".kitchen"}, "--name '.kitchen': expected 1 to 64 letters"),
        ({"--name": "küche"}, "--name 'küche': expected 1 to 64 letters"),
        ({"--name": "a" * 65}, "expected 1 to 64 letters"),
        ({"--name": "a/b"}, "expected 1 to 64 letters"),
        ({"--shard": "gone.bin"}, "gone.bin: cannot read the shard (No such file or directory); check --shard"),
        ({"--shard": "."}, ".: cannot read the shard (Is a directory)"),
        ({"--broker": "http://x"}, "broker 'http://x': expected mqtts://host"),
        ({"--broker": "mqtt://example.org"}, "use mqtts://, or ask for it with --insecure"),
        ({"--ca": "gone.crt"}, "gone.crt: cannot read it (No such file or directory)"),
        ({"--cert": "a.crt"}, "give --cert and --key"),
        ({"--user": NAME}, "give both --user and --password-file"),
        ({"--user": "cellar", "--password-file": "x"}, "--user 'cellar' is not --name 'kitchen': a broker lets a user"),
        ({"--state": "gone/x.state"}, "gone/x.state: gone is no folder; make it, or check --state"),
        ({"--state": "."}, ".: cannot read the state (Is a directory)"),
        ({"--number": "-1"}, "argument --number: '-1' given, expected a number from 0 on"),
        ({"--number": "4294967295"}, "expected a number from 0 on"),
        ({"--save-every": "0"}, "argument --save-every: '0' given, expected a number from 1 on"),
        ({"--memory-budget": "12Q"}, "argument --memory-budget: '12Q' given, expected bytes such as 65536, 64K or 2M"),
        ({"--memory-budget": "K"}, "'K' given, expected bytes"),
        ({"--memory-budget": "0M"}, "'0M' given, expected bytes"),
        ({"--speed": "9"}, "unrecognized arguments: --speed=9"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: dict[str, str | None], complaint: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_shard(Path("shard.bin"))
    arguments = [f"{key}={value}" for key, value in (GOOD | options).items() if value is not None]
    if complaint.endswith("expected one argument"):
        arguments = ["--name", "-kitchen"]
    assert agent.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("foreseed-device: ")
    assert complaint in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["shard.bin"]


@pytest.mark.parametrize(("text", "expected"), [("65536", 65536), ("64K", 65536), ("2m", 2 << 20), ("1k", 1024)])
def test_a_budget_is_bytes_or_has_a_unit(text: str, expected: int) -> None:
    parsed = agent._parser().parse_args([f"{key}={value}" for key, value in GOOD.items()] + ["--memory-budget", text])
    assert parsed.memory_budget == expected


def test_help_has_an_example_and_version_the_version() -> None:
    outputs = [
        subprocess.run([*COMMAND, option], capture_output=True, text=True, check=True)
        for option in ("--help", "--version")
    ]
    assert "foreseed-device --broker mqtts://broker.example:8883 --name kitchen" in outputs[0].stdout
    assert outputs[1].stdout == f"foreseed {__version__}\n"


# --- without a broker, where the order of things matters ---


class PretendLink:
    """A link to a scripted server that gives an order and the one that replaces it in one breath."""

    traffic = (1, 2)

    def __init__(
        self, *_: object, received: Callable[[str, bytes], None], connected: Callable[[], None], **__: Any
    ) -> None:
        self.start, self._received = connected, received
        self.server = Server(small_coordinator(PROGRAM), PROGRAM)
        self.last: tuple[Any, ...] = ()

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        message = decode(payload)
        answers = self.server.take(message)
        if isinstance(message, Ready):
            order = self.server.order()
            answers = [order._replace(k=9), order._replace(k=8)]
        if isinstance(message, Reply):
            answers = [self.server.announce(finished=True)]
        for answer in answers:
            self._received("", encode(answer))

    def stop(self, *last: tuple[str, bytes, bool]) -> None:
        self.last = last


def test_an_order_that_is_replaced_before_it_is_begun_costs_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    made: list[PretendLink] = []
    monkeypatch.setattr(loop, "Link", lambda *args, **options: made.append(PretendLink(*args, **options)) or made[0])
    write_shard(Path("shard.bin"))
    assert agent.main([f"{key}={value}" for key, value in GOOD.items()] + ["--once"]) == 0
    replies = [message for message in made[0].server.heard if isinstance(message, Reply)]
    assert [len(reply.losses) for reply in replies] == [4 * (1 + 8)]
    assert replies[0][-2:] == (1, 2)
    ((topic, payload, retained),) = made[0].last
    assert (topic, retained) == (topics.here(NAME), True)
    assert not decode(payload, Presence).here  # type: ignore[union-attr]
    assert "round 1: answered in" in capsys.readouterr().out


def test_a_state_that_cannot_be_saved_is_said_and_the_device_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(loop, "Link", PretendLink)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent.state, "save", full)
    write_shard(Path("shard.bin"))
    assert agent.main([f"{key}={value}" for key, value in GOOD.items()] + ["--once"]) == 0
    out, err = capsys.readouterr()
    assert "kitchen.state: cannot save the state (No space left on device); going on without" in out
    assert "round 1: answered in" in out
    assert err == ""


def test_a_link_that_gives_up_ends_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refused(PretendLink):
        def __init__(self, *args: object, failed: Callable[[LinkError], None], **options: Any) -> None:
            super().__init__(*args, **options)
            self.start = lambda: failed(LinkError("the broker refused user 'kitchen'; check the credentials"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(loop, "Link", Refused)
    write_shard(Path("shard.bin"))
    assert agent.main([f"{key}={value}" for key, value in GOOD.items()]) == 2
    assert capsys.readouterr().err == "foreseed-device: the broker refused user 'kitchen'; check the credentials\n"


def test_a_cleared_announcement_is_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cleared(PretendLink):
        def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
            if isinstance(decode(payload), Join):
                self._received(topics.ALL, b"")
                self._received(topics.down(NAME, "01234567"), b"")
            super().publish(topic, payload, retain)

    made: list[Member] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(loop, "Link", Cleared)
    monkeypatch.setattr(agent, "Member", lambda *args, **options: made.append(Member(*args, **options)) or made[0])
    write_shard(Path("shard.bin"))
    assert agent.main([f"{key}={value}" for key, value in GOOD.items()] + ["--once"]) == 0
    assert made[0].refused == {"malformed": 1}  # the server's orders are never cleared: nothing there is no message


def test_a_device_without_memory_fails_so_that_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: object, **__: object) -> Member:
        raise MemoryError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent, "Member", exhausted)
    write_shard(Path("shard.bin"))
    assert agent.main([f"{key}={value}" for key, value in GOOD.items()]) == 1
    assert capsys.readouterr().err.startswith("foreseed-device: out of memory; ")

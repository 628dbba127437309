"""The link to a real mosquitto: troubles and their end, wills, refusals, bytes."""

import contextlib
import datetime
import ipaddress
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from foreseed.fleet.keys import make_keys
from foreseed.transport import link
from foreseed.transport.link import Link, LinkError, broker
from tests.fleet.broker import Mosquitto, free_ports

PATIENCE = 300.0
"""Seconds after which a test gives up waiting; what it waits for takes moments."""


def eventually(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.01)


class Owner:
    """Somebody with a link, who notes all that it tells."""

    def __init__(self, address, topics=(), *, will=None, quiet=None, client_id="owner", **credentials):
        self.lines, self.messages, self.errors = [], queue.SimpleQueue(), queue.SimpleQueue()
        self.connections = 0
        self.link = Link(
            broker(address, **credentials) if isinstance(address, str) else address,
            client_id,
            list(topics),
            received=lambda topic, payload: self.messages.put((topic, payload)),
            connected=self._connected,
            failed=self.errors.put,
            say=self.lines.append,
            will=will,
            quiet=quiet,
        )
        self.link.start()

    def _connected(self):
        self.connections += 1

    def up(self, times=1):
        eventually(lambda: self.connections >= times)
        return self

    def next(self):
        return self.messages.get(timeout=PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.stop()


class Authority:
    """Signs certificates for brokers, good ones and others."""

    def __init__(self, folder: Path, name="authority"):
        self.folder, self.name = folder, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.crt"
        self.ca.write_bytes(self._signed(self.name, self.key, -9, 9, x509.BasicConstraints(True, None)))

    def certify(self, host="127.0.0.1", start=-9, end=9):
        """Write a certificate and its key for the broker."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "broker")])
        (self.folder / "broker.crt").write_bytes(self._signed(subject, key, start, end, hosts))
        form, no_lock = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (self.folder / "broker.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, no_lock))

    def _signed(self, subject, key, start, end, extension):
        valid = [datetime.datetime.now(datetime.UTC) + datetime.timedelta(days) for days in (start, end)]
        builder = x509.CertificateBuilder(self.name, subject, key.public_key(), x509.random_serial_number(), *valid)
        signed = builder.add_extension(extension, True).sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def mosquitto():
    with Mosquitto.plain() as running:
        yield running


@pytest.fixture
def authority(tmp_path):
    made = Authority(tmp_path)
    made.certify()
    return made


def tls_broker(folder: Path, *lines: str) -> Mosquitto:
    (port,) = free_ports(1)
    config = [
        "user root", f"listener {port} 127.0.0.1", "allow_anonymous true", "log_dest stderr",
        f"certfile {folder}/broker.crt", f"keyfile {folder}/broker.key", *lines,
    ]  # fmt: skip
    return Mosquitto("\n".join(config) + "\n", [port])


def test_a_message_comes_back_as_it_was_sent(mosquitto):
    with Owner(mosquitto.url, ["a/+"]).up() as owner:
        payload = bytes(range(256)) * 1000
        owner.link.publish("a/b", payload)
        owner.link.publish("other", b"not subscribed")
        owner.link.publish("a/c", b"")
        assert [owner.next(), owner.next()] == [("a/b", payload), ("a/c", b"")]
        assert owner.lines == [f"{mosquitto.url}: connected"]


def test_a_message_published_in_connected_is_sent(mosquitto):
    owner = Owner.__new__(Owner)
    owner._connected = lambda: owner.link.publish("hello", b"here", retain=True)
    owner.__init__(mosquitto.url, ["hello"])
    with owner:
        assert owner.next() == ("hello", b"here")


def test_retained_messages_greet_who_comes_later(mosquitto):
    with Owner(mosquitto.url, ["news"], client_id="one").up() as owner:
        owner.link.publish("news", b"kept", retain=True)
        assert owner.next() == ("news", b"kept")
    with Owner(mosquitto.url, ["news"], client_id="two") as late:
        assert late.next() == ("news", b"kept")


def test_messages_of_several_threads_arrive_whole_and_each_once(mosquitto):
    sent = {f"{thread}.{i}".encode() * (1 + 9973 * i % 200_000) for thread in range(8) for i in range(20)}
    with Owner(mosquitto.url, ["all"], client_id="reader").up() as reader, Owner(mosquitto.url).up() as writer:
        # The socket takes a part of a message at a time: there others could come in between.
        writer.link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        shares = [sorted(sent)[start::8] for start in range(8)]
        threads = [
            threading.Thread(target=lambda share=share: [writer.link.publish("all", one) for one in share])
            for share in shares
        ]
        for thread in threads:
            thread.start()
        received = [reader.next()[1] for _ in sent]
        for thread in threads:
            thread.join()
    assert len(received) == len(sent)
    assert set(received) == sent


def test_a_link_outlives_its_broker_and_subscribes_again(mosquitto):
    with Owner(mosquitto.url, ["x"]).up() as owner:
        for life in range(2, 5):
            mosquitto.kill()
            eventually(lambda life=life: len([line for line in owner.lines if "lost" in line]) == life - 1)
            owner.link.publish("x", b"dropped: there is no broker")
            mosquitto.start()
            owner.up(life).link.publish("x", b"life %d" % life)
            assert owner.next() == ("x", b"life %d" % life)
        assert owner.lines[-1] == f"{mosquitto.url}: connected"


def test_a_restart_is_told_in_a_line_each_way(mosquitto):
    with Owner(mosquitto.url).up() as owner:
        mosquitto.kill()
        eventually(lambda: any("cannot be reached" in line for line in owner.lines))
        mosquitto.start()
        owner.up(2)
    told = [line.removeprefix(f"{mosquitto.url}: ") for line in owner.lines]
    assert told == [
        "connected",
        "the connection was lost; trying again",
        "it cannot be reached (Connection refused); trying again",
        "connected",
    ]


CLIENT = """
    import sys
    from foreseed.transport.link import Link, broker

    quiet = lambda *_: None
    link = Link(broker(sys.argv[1]), "mortal", [], received=quiet, connected=lambda: print("up", flush=True),
                failed=quiet, say=quiet, will=("here", b"gone"))
    link.start()
    sys.stdin.read()
    link.stop(("here", b"farewell", True))
"""


@pytest.fixture
def mortal(mosquitto):
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), mosquitto.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


def test_the_will_of_a_killed_process_is_published_and_kept(mosquitto, mortal):
    with Owner(mosquitto.url, ["here"]).up() as watcher:
        mortal.send_signal(signal.SIGKILL)
        assert watcher.next() == ("here", b"gone")
    with Owner(mosquitto.url, ["here"]) as late:
        assert late.next() == ("here", b"gone")


def test_a_clean_stop_delivers_the_last_words_and_no_will(mosquitto, mortal):
    with Owner(mosquitto.url, ["here", "end"]).up() as watcher:
        mortal.stdin.close()
        assert mortal.wait(PATIENCE) == 0
        # The broker has dealt with the other's end by the time it passes this on.
        eventually(lambda: "mortal disconnected" in mosquitto.log)
        watcher.link.publish("end", b"")
        assert [watcher.next(), watcher.next()] == [("here", b"farewell"), ("end", b"")]


def test_a_stop_without_a_broker_ends_the_thread():
    (port,) = free_ports(1)
    owner = Owner(f"mqtt://127.0.0.1:{port}")
    eventually(lambda: owner.lines)
    owner.link.stop(("here", b"nobody hears it", True))
    assert not [thread for thread in threading.enumerate() if thread.name == "link owner"]


TROUBLES = {
    "its certificate has expired": lambda authority: authority.certify(end=-1),
    "its certificate is not valid yet": lambda authority: authority.certify(start=1),
    "its certificate is for another host": lambda authority: authority.certify(host="127.0.0.2"),
    "an authority unknown here": lambda authority: Authority(authority.folder, "stranger").certify(),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_wrong_certificate_is_told_once_and_the_link_waits_for_a_better_one(authority, trouble):
    TROUBLES[trouble](authority)
    with tls_broker(authority.folder) as mosquitto, Owner(mosquitto.tls_url, ca=str(authority.ca)) as owner:
        eventually(lambda: mosquitto.log.count(" alert ") >= 3)
        assert len(owner.lines) == 1
        assert trouble in owner.lines[0]
        assert owner.connections == 0
        authority.certify()
        mosquitto.restart()
        owner.up()
        assert owner.lines[-1] == f"{mosquitto.tls_url}: connected"


def test_a_broker_that_is_not_there_yet_is_waited_for():
    (port,) = free_ports(1)
    with Owner(f"mqtt://localhost:{port}") as owner:
        eventually(lambda: owner.lines)
        with Mosquitto(f"user root\nlistener {port} 127.0.0.1\nallow_anonymous true\n", [port]):
            owner.up().link.stop()
    assert owner.lines == [
        f"mqtt://localhost:{port}: it cannot be reached (Connection refused); trying again",
        f"mqtt://localhost:{port}: connected",
    ]


def test_a_host_name_that_nobody_knows_is_told_until_somebody_does(mosquitto, monkeypatch):
    # No name server is asked about a name with so long a part.
    host = "a" * 64 + ".invalid"
    with Owner(f"mqtt://{host}:{mosquitto.port}", insecure=True) as owner:
        eventually(lambda: owner.lines)
        assert "the host name cannot be found" in owner.lines[0]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", mosquitto.port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
        owner.up()
        assert len(owner.lines) == 2


# Several addresses.


def test_links_spread_over_the_nodes_and_move_on_when_one_is_gone():
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Mosquitto.plain()) for _ in range(3)]
        urls = ",".join(node.url for node in nodes)
        owners = [stack.enter_context(Owner(urls, ["x"], client_id=f"owner-{i}")).up() for i in range(30)]
        began = [owner.lines[-1].removesuffix(": connected") for owner in owners]
        assert set(began) == {node.url for node in nodes}  # 30 links miss a node once in 60,000 times
        nodes[0].kill()
        moved = [owner.up(2) for owner, at in zip(owners, began, strict=True) if at == nodes[0].url]
        assert {owner.lines[-1].removesuffix(": connected") for owner in moved} <= {nodes[1].url, nodes[2].url}
        for owner in moved:
            assert owner.lines[1] == f"{nodes[0].url}: the connection was lost; trying again"
        # The others have noticed nothing.
        assert all(len(owner.lines) == 1 for owner in owners if owner not in moved)


def test_a_quiet_link_to_a_cluster_hears_again_what_is_retained_and_to_a_single_broker_does_not(mosquitto):
    (port,) = free_ports(1)
    cluster = f"{mosquitto.url},mqtt://127.0.0.1:{port}"
    with (
        Owner(cluster, ["x"], quiet=0.2).up() as owner,
        Owner(mosquitto.url, ["x"], client_id="one", quiet=0.2).up() as one,
    ):
        owner.link.publish("x", b"it is over", retain=True)
        # The first was heard as it was published, the others because it was asked for.
        assert [owner.next() for _ in range(3)] == [("x", b"it is over")] * 3
        assert (owner.connections, len(owner.lines)) == (1, 1)
        owner.link.publish("x", b"the last", retain=True)
        assert [one.next(), one.next()] == [("x", b"it is over"), ("x", b"the last")]


def test_no_address_answers_names_each_with_its_reason_in_one_line():
    (port,) = free_ports(1)
    gone = f"mqtt://127.0.0.1:{port}"
    with Stranger(b" \x02\0\x03") as unavailable, Owner(f"{gone},{unavailable.url}") as owner:
        eventually(lambda: owner.lines)
        assert sorted([
            f"{gone}: it cannot be reached (Connection refused)",
            f"{unavailable.url}: it refused the connection (Server unavailable)",
        ]) == owner.lines[0].removesuffix("; trying again").split("; ")  # fmt: skip
        time.sleep(1.0)
        assert len(owner.lines) == 1


def test_a_node_of_another_authority_is_named_and_passed_over(authority, tmp_path):
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    other.certify()
    with tls_broker(authority.folder) as good, tls_broker(other.folder) as bad:
        while True:
            with Owner(f"{bad.tls_url},{good.tls_url}", ca=str(authority.ca)).up() as owner:
                (line,) = owner.lines
                assert line.endswith(f"{good.tls_url}: connected")
                if line != f"{good.tls_url}: connected":
                    break
        assert line.startswith(f"{bad.tls_url}: its certificate is of an authority unknown here; give its --ca; ")


def test_only_a_refusal_by_every_node_ends_a_link():
    (port,) = free_ports(1)
    refuses = b" \x02\0\x05"
    with Stranger(refuses) as one, Stranger(refuses) as two:
        with Owner(f"{one.url},{two.url}") as owner:
            error = str(owner.errors.get(timeout=PATIENCE))
            assert all(f"{node.url}: it refused this client (Not authorized)" in error for node in (one, two))
        with Owner(f"{one.url},mqtt://127.0.0.1:{port}") as owner:
            eventually(lambda: owner.lines)
            assert "cannot be reached" in owner.lines[0]
            assert "refused this client" in owner.lines[0]
            assert owner.errors.empty()


class Stranger:
    """Something on a port that is no broker: it answers every connection with the same bytes, and hangs up."""

    def __init__(self, answer: bytes):
        self.answer, self.visits = answer, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            visitor, _ = self._socket.accept()
            with visitor:
                if not self.answer:
                    return
                visitor.recv(65536)
                visitor.sendall(self.answer)
                self.visits += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.answer = b""
        socket.create_connection(self._socket.getsockname()).close()
        self._thread.join()
        self._socket.close()


ANSWERS = {
    "a web server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a shell": b"SSH-2.0-OpenSSH_9.2\r\n",
    "zeros": bytes(50),
    "ones": b"\xff" * 50,
    "half a packet": b" ",
    "a torn message": b"\x30\x03\0\x09x",
    "Server unavailable": b" \x02\0\x03",
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("scheme", ["mqtt", "mqtts"])
def test_whatever_else_answers_on_the_port_is_told_and_survived(authority, answer, scheme):
    with Stranger(ANSWERS[answer]) as stranger:
        address = stranger.url.replace("mqtt:", f"{scheme}:")
        with Owner(address, ca=str(authority.ca) if scheme == "mqtts" else "") as owner:
            eventually(lambda: stranger.visits >= 3)
            assert len(owner.lines) == 1
            expected = (
                "TLS failed"
                if scheme == "mqtts"
                else answer
                if answer == "Server unavailable"
                else "accepts no connection"
            )
            assert expected in owner.lines[0]


def test_messages_that_nobody_asked_for_are_passed_over():
    accepted, subscribed = b" \x02\0\0", b"\x90\x03\0\x01\x01"
    no_text, other, fine = b"\x30\x03\0\x01\xff", b"\x30\x03\0\x01y", b"\x30\x05\0\x01xok"
    with Stranger(accepted + subscribed + no_text + other + fine) as stranger, Owner(stranger.url, ["x"]) as owner:
        assert owner.next() == ("x", b"ok")


def test_a_plain_link_to_a_tls_port_is_told_what_to_use(authority):
    with tls_broker(authority.folder) as mosquitto, Owner(mosquitto.url) as owner:
        eventually(lambda: owner.lines)
        assert "mqtts://" in owner.lines[0]


def test_a_missing_client_certificate_is_told(authority):
    needs = (f"cafile {authority.ca}", "require_certificate true")
    with (
        tls_broker(authority.folder, *needs) as mosquitto,
        Owner(mosquitto.tls_url, ca=str(authority.ca)) as owner,
    ):
        eventually(lambda: owner.lines)
        assert "certificate" in owner.lines[0]
        assert owner.connections == 0


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, ["board"])
    return folder


def test_certificate_or_password_let_a_device_in(keys):
    ca = str(keys / "ca.crt")
    by_certificate = {"cert": str(keys / "board.crt"), "key": str(keys / "board.key")}
    by_password = {"user": "board", "password_file": str(keys / "board.password")}
    with Mosquitto.secure(keys) as mosquitto:
        Owner(mosquitto.tls_url, ["foreseed/1/all"], ca=ca, **by_certificate).up().link.stop()
        Owner(mosquitto.password_url, ["foreseed/1/all"], ca=ca, **by_password).up().link.stop()


def test_a_wrong_password_ends_the_link(keys, tmp_path):
    (tmp_path / "wrong").write_text("guess\n")
    with Mosquitto.secure(keys) as mosquitto:
        wrong = {"ca": str(keys / "ca.crt"), "user": "board", "password_file": str(tmp_path / "wrong")}
        with Owner(mosquitto.password_url, **wrong) as owner:
            error = owner.errors.get(timeout=PATIENCE)
            assert isinstance(error, LinkError)
            assert str(error).startswith(f"{mosquitto.password_url}: it refused user 'board'")
            eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "link owner"])
            assert owner.connections == 0


def test_a_subscription_that_is_refused_ends_the_link():
    with Stranger(b" \x02\0\0" + b"\x90\x03\0\x01\x80") as stranger, Owner(stranger.url, ["secret"]) as owner:
        assert "does not let this client read secret" in str(owner.errors.get(timeout=PATIENCE))
        assert owner.connections == 0


def test_a_refusal_after_a_connection_is_told_once_and_waited_out(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(link, "_LONGEST_RETRY", 0.05)
    folder = tmp_path / "keys"
    shutil.copytree(keys, folder)
    passwords, server = folder / "mosquitto" / "passwords", folder / "mosquitto.conf"
    server.write_text(server.read_text().replace(str(keys), str(folder)))
    good = passwords.read_text()
    mine = {"ca": str(folder / "ca.crt"), "user": "board", "password_file": str(folder / "board.password")}
    with Mosquitto.secure(folder) as mosquitto, Owner(mosquitto.password_url, ["foreseed/1/all"], **mine).up() as owner:
        passwords.write_text("".join(line for line in good.splitlines(True) if not line.startswith("board:")))
        mosquitto.restart()
        eventually(lambda: mosquitto.log.count("not authorised") >= 3)
        passwords.write_text(good)
        mosquitto.restart()
        owner.up(2)
        assert owner.errors.empty()
    told = [line for line in owner.lines if "it refused user 'board'" in line]
    assert len(told) == 1
    assert told[0].endswith("; check the credentials; trying again")


def test_a_refused_link_that_was_up_tries_again_at_the_longest_delay(monkeypatch):
    waits = {True: [], False: []}
    accepted, refused = b" \x02\0\0" + b"\x90\x03\0\x01\x01", b" \x02\0\x05"

    def wait(seconds):
        waits[owner.link._is_refused].append(seconds)
        stranger.answer = refused
        time.sleep(0.01)

    with Stranger(accepted) as stranger, Owner(stranger.url, ["x"]) as owner:
        monkeypatch.setattr(owner.link._stopping, "wait", wait)
        eventually(lambda: len(waits[True]) >= 3)
        assert owner.errors.empty()
    assert max(waits[False]) < 1
    assert min(waits[True]) >= 30


def test_an_idle_link_stays_up_and_a_silent_broker_is_noticed(mosquitto, monkeypatch):
    monkeypatch.setattr(link, "_KEEP_ALIVE", 1)
    with Owner(mosquitto.url).up() as owner:
        before = owner.link.traffic[1]
        eventually(lambda: owner.link.traffic[1] >= before + 6)  # three answers to "are you there?"
        assert len(owner.lines) == owner.connections == 1
        os.kill(mosquitto.pid, signal.SIGSTOP)
        eventually(lambda: len(owner.lines) > 1)
        assert "the connection was lost" in owner.lines[1]
        os.kill(mosquitto.pid, signal.SIGCONT)
        owner.up(2)


class Meter:
    """Passes bytes on between clients and a broker, and counts them."""

    def __init__(self, port: int):
        self._broker, self.up, self.down = port, 0, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            client, _ = self._socket.accept()
            if self._broker == 0:
                return client.close()
            thread = threading.Thread(target=self._pass_on, args=(client,))
            thread.start()
            self._threads.append(thread)

    def _pass_on(self, client):
        with client, socket.create_connection(("127.0.0.1", self._broker)) as server:
            back = threading.Thread(target=self._pump, args=(server, client, "down"))
            back.start()
            self._pump(client, server, "up")
            back.join()

    def _pump(self, source, sink, name):
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                setattr(self, name, getattr(self, name) + len(piece))
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._broker = 0
        socket.create_connection(("127.0.0.1", self.port)).close()
        for thread in self._threads:
            thread.join()
        self._socket.close()


@pytest.fixture
def no_repeats(monkeypatch):
    """Segments that a busy machine sends twice are on the wire twice, but nobody beyond TCP sees that."""
    counted = link._tcp_bytes

    def once(connection):
        # linux/tcp.h, struct tcp_info: tcpi_bytes_retrans at 208.
        repeated = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)[208:]
        sent, received = counted(connection)
        return sent - int.from_bytes(repeated, "little"), received

    monkeypatch.setattr(link, "_tcp_bytes", once)


@pytest.mark.usefixtures("no_repeats")
@pytest.mark.parametrize("scheme", ["mqtt", "mqtts"])
def test_counts_are_the_bytes_that_went_over_the_wire(authority, scheme):
    plain = scheme == "mqtt"
    with (
        Mosquitto.plain() if plain else tls_broker(authority.folder) as mosquitto,
        Meter(mosquitto.port) as meter,
        Owner(f"{scheme}://127.0.0.1:{meter.port}", ["x"], ca="" if plain else str(authority.ca)).up() as owner,
    ):
        for size in (1, 1000, 100_000):
            owner.link.publish("x", bytes(size))
            assert owner.next() == ("x", bytes(size))
            eventually(lambda: owner.link.traffic == (meter.up, meter.down))
        first = owner.link.traffic
        assert min(first) > 101_001
        # The end of a connection takes nothing from the count and adds nothing to it.
        mosquitto.restart()
        owner.up(2).link.publish("x", b"again")
        assert owner.next() == ("x", b"again")
        eventually(lambda: owner.link.traffic == (meter.up, meter.down))
        second = owner.link.traffic
        # What a broker still says after our farewell, such as TLS's own, nobody hears.
        owner.link.stop(("y", b"the last word", False))
        eventually(lambda: owner.link.traffic[0] == meter.up)
        assert first < second < owner.link.traffic
        assert second[1] < owner.link.traffic[1] <= meter.down


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("mqtts://broker.example.org", "broker.example.org", 8883),
        ("mqtts://broker-1:99/", "broker-1", 99),
        ("mqtts://[2001:db8::1]", "2001:db8::1", 8883),
        ("mqtt://localhost", "localhost", 1883),
        ("mqtt://127.8.0.1:5", "127.8.0.1", 5),
        ("mqtt://[::1]:65535", "::1", 65535),
    ],
)
def test_urls_of_brokers_are_understood(url, host, port):
    found = broker(url)
    assert (found.addresses, found.tls is not None) == (((host, port),), url.startswith("mqtts"))


@pytest.mark.parametrize(
    "url",
    [
        "", "broker", "localhost:1883", "http://localhost", "mqtts://", "mqtts:///x", "mqtts://host/path", "mqtts://:88",
        "mqtts://host:", "mqtts://host:0", "mqtts://host:65536", "mqtts://host:x", "mqtts://host:-1", "mqtts://host?x",
        "a,b", "a,mqtts://b", "mqtts://a,", ",mqtts://a", "mqtts://a,,b", "mqtts://a,http://b",
        "mqtts://::1", "mqtts://[host]", "mqtts://[::1", "mqtts://höst", "mqtts://a b", "mqtts://host#x", "mqtts://host:²",
    ],
)  # fmt: skip
def test_other_urls_are_refused(url):
    with pytest.raises(LinkError, match="expected mqtts://host"):
        broker(url)


def test_the_nodes_of_a_cluster_are_a_list_with_the_scheme_of_the_first():
    found = broker("mqtts://one,two:99,mqtts://[::1],one:8883")
    assert found.addresses == (("one", 8883), ("two", 99), ("::1", 8883))
    assert str(found) == "mqtts://one:8883,mqtts://two:99,mqtts://[::1]:8883"
    with pytest.raises(LinkError, match="in one list; give all nodes"):
        broker("mqtts://one,mqtt://localhost")
    with pytest.raises(LinkError, match=r"plain text.*--insecure"):
        broker("mqtt://localhost,10.0.0.1")


@pytest.mark.parametrize("host", ["broker.example.org", "10.0.0.1", "127.example.org", "[2001:db8::1]", "0.0.0.0"])
def test_plain_text_to_another_machine_must_be_asked_for(host):
    with pytest.raises(LinkError, match=r"plain text.*--insecure"):
        broker(f"mqtt://{host}")
    assert broker(f"mqtt://{host}", insecure=True).tls is None


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(LinkError, match="--password-file") as caught:
        broker("mqtts://board:secret@host")
    assert "secret" not in str(caught.value)


def test_the_password_is_the_line_in_its_file(tmp_path):
    (tmp_path / "password").write_text("pässword \r\n", encoding="utf-8")
    found = broker("mqtts://host", user="board", password_file=str(tmp_path / "password"))
    assert (found.user, found.password) == ("board", "pässword ")


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines\n", b"\xff\xfe", b"x" * 65536, None])
def test_a_file_without_a_password_is_refused(tmp_path, content):
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LinkError, match=r"password: .*--password-file"):
        broker("mqtts://host", user="board", password_file=str(path))


def test_credentials_that_lack_their_other_half_are_refused(keys):
    certificate, key = str(keys / "board.crt"), str(keys / "board.key")
    for half in ({"user": "board"}, {"password_file": "x"}, {"cert": certificate}, {"key": key}):
        with pytest.raises(LinkError, match=r"give .*--"):
            broker("mqtts://host", **half)


def test_certificates_without_tls_are_refused(keys):
    with pytest.raises(LinkError, match="use mqtts://"):
        broker("mqtt://localhost", ca=str(keys / "ca.crt"))


def test_certificates_that_are_none_are_refused(keys, tmp_path):
    (tmp_path / "text").write_text("no certificate")
    ca, certificate, key = (str(keys / name) for name in ("ca.crt", "board.crt", "board.key"))
    text, missing, other = str(tmp_path / "text"), str(tmp_path / "missing"), str(keys / "server.key")
    wrong = [
        {"ca": text}, {"ca": missing}, {"ca": str(tmp_path)}, {"cert": certificate, "key": missing},
        {"cert": text, "key": key}, {"cert": certificate, "key": text}, {"cert": certificate, "key": other},
    ]  # fmt: skip
    for credentials in wrong:
        with pytest.raises(LinkError, match=r"PEM|cannot read"):
            broker("mqtts://host", **{"ca": ca, **credentials})
    assert broker("mqtts://host", ca=ca, cert=certificate, key=key).tls is not None


def test_an_encrypted_key_is_refused_rather_than_asked_about(keys, tmp_path):
    key = serialization.load_pem_private_key((keys / "board.key").read_bytes(), None)
    form, lock = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "locked").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    with pytest.raises(LinkError, match="unencrypted key"):
        broker("mqtts://host", cert=str(keys / "board.crt"), key=str(tmp_path / "locked"))


def test_a_device_loads_neither_a_web_client_nor_a_logger():
    check = """
        import sys
        from foreseed.transport import link

        heavy = {"http.client", "urllib.request", "logging", "uuid", "email", "encodings.idna", "json", "platform"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        import logging, platform, urllib.request, uuid

        assert logging.getLogger() and urllib.request.urlopen and uuid.uuid4() and platform.machine()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(check)], check=True)

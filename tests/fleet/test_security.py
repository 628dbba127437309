"""The broker as we ship it, a real mosquitto: who gets in, and what a device can do there.

Every refusal has its control: what is allowed goes through the same lines.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from foreseed.fleet.keys import Identity, make_keys
from tests.fleet.clients import KINDS, Client, Fleet, Kind, wait

MINE = "foreseed/1/d/device-1/"
FORBIDDEN_TO_WRITE = [
    "foreseed/1/all",
    "foreseed/1/d/device-2/here",
    "foreseed/1/d/device-2/up/00000000",
    "foreseed/1/d/device-2/down/00000000",
    "foreseed/1/d/device-10/here",
    "foreseed/1/d/device-10/up/00000000",
    "foreseed/1/d/server/here",
    "foreseed/1/d/DEVICE-1/here",
    f"{MINE}down/00000000",
    f"{MINE}up",
    f"{MINE}up/00000000/more",
    f"{MINE}here/more",
    "foreseed/1/d/here",
    "foreseed/1/other",
]
FORBIDDEN_TO_READ = [
    "foreseed/1/d/device-2/here",
    "foreseed/1/d/device-2/up/00000000",
    "foreseed/1/d/device-2/down/00000000",
    "foreseed/1/d/device-10/down/00000000",
    f"{MINE}down/00000000/more",
    "foreseed/1/other",
]
WILDCARDS = ["#", "+/#", "foreseed/#", "foreseed/1/d/+/down/+", "+/+/+/+/+/+", "$SYS/#", "$share/all/foreseed/#"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "keys"
    make_keys(folder, ["device-1", "device-2", "device-10"])
    return folder


@pytest.fixture(scope="module")
def broker(keys: Path) -> Iterator[Fleet]:
    running = Fleet(keys)
    with running.broker:
        yield running


@pytest.fixture
def fleet(broker: Fleet) -> Iterator[Fleet]:
    """The shared broker, without clients and without retained messages."""
    yield broker
    broker.forget()
    server = broker.connect("server")
    server.read("foreseed/1/#")
    server.say("foreseed/1/fence")
    wait(lambda: ("foreseed/1/fence", b"x") in server.got, server)
    for topic, _ in list(server.got):
        server.say(topic, b"", retain=True)
    broker.forget()


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A broker of the test's own, to change its files."""
    make_keys(tmp_path / "keys", ["device-1", "device-2"])
    running = Fleet(tmp_path / "keys")
    with running.broker:
        yield running
        running.forget()


def signed(authority: Path, folder: Path, name: str, ended: bool = False) -> Identity:
    """A certificate as an attacker or a slow administrator may have it, signed by the CA in `authority`."""
    key, now = generate_private_key(SECP256R1()), datetime.now(UTC)
    ca = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(2))
        .not_valid_after(now - timedelta(1) if ended else now + timedelta(1))
        .sign(load_pem_private_key((authority / "ca.key").read_bytes(), None), SHA256())  # type: ignore[arg-type]
    )
    made = Identity(folder, name)
    made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    made.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
    return made


# Who gets in.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["server", "device-1"])
def test_a_name_with_its_keys_gets_in(fleet: Fleet, name: str, kind: Kind) -> None:
    assert fleet.outcome(fleet.client(name, kind), kind) == "connected"


@pytest.mark.parametrize(
    ("ours", "ended", "expected"), [(True, False, "connected"), (True, True, "closed"), (False, False, "closed")]
)
def test_only_a_certificate_of_our_ca_that_has_not_ended_gets_in(
    fleet: Fleet, tmp_path: Path, ours: bool, ended: bool, expected: str
) -> None:
    make_keys(tmp_path / "other", [])
    identity = signed(fleet.keys if ours else tmp_path / "other", tmp_path, "device-1", ended)
    client = Client()
    client.tls_set(str(fleet.keys / "ca.crt"), str(identity.cert), str(identity.key))
    assert fleet.outcome(client, "certificate") == expected


@pytest.mark.parametrize(("file", "expected"), [("device-1", "connected"), ("mosquitto/broker", "closed")])
def test_the_brokers_own_certificate_lets_nobody_in(fleet: Fleet, file: str, expected: str) -> None:
    client = Client()
    client.tls_set(str(fleet.keys / "ca.crt"), str(fleet.keys / f"{file}.crt"), str(fleet.keys / f"{file}.key"))
    assert fleet.outcome(client, "certificate") == expected


def test_a_password_does_not_stand_in_for_a_certificate(fleet: Fleet) -> None:
    assert fleet.outcome(fleet.client("device-1", "password"), "password") == "connected"
    assert fleet.outcome(fleet.client("device-1", "password"), "certificate") == "closed"


def test_a_certificate_does_not_stand_in_for_a_password(fleet: Fleet) -> None:
    client = fleet.client("device-1", "certificate")
    assert fleet.outcome(client, "password") == "refused: Not authorized"


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("device-1", "wrong"),
        ("device-1", ""),
        ("device-1", None),
        ("device-1", "of device-2"),
        ("nobody", "wrong"),
        ("", "wrong"),
    ],
)
def test_a_wrong_password_is_refused(fleet: Fleet, name: str, password: str | None) -> None:
    client = fleet.client("device-1", "password")
    if password == "of device-2":
        password = Identity(fleet.keys, "device-2").password.read_text().strip()
    client.username_pw_set(name, password)
    assert fleet.outcome(client, "password") == "refused: Not authorized"


@pytest.mark.parametrize(("kind", "expected"), [("certificate", "closed"), ("password", "refused: Not authorized")])
def test_nobody_gets_in_without_a_name(fleet: Fleet, kind: Kind, expected: str) -> None:
    client = Client()
    client.tls_set(str(fleet.keys / "ca.crt"))
    assert fleet.outcome(client, kind) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_gets_in_without_tls(fleet: Fleet, kind: Kind) -> None:
    client = Client()
    client.username_pw_set("device-1", Identity(fleet.keys, "device-1").password.read_text().strip())
    assert fleet.outcome(client, kind) == "closed"


def shake_hands(port: int, folder: Path, any_host: bool = False, newest: ssl.TLSVersion | None = None) -> str | None:
    """Connect as device-1 of a folder, checking the broker as Python does by default; gives the version of TLS."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "device-1.crt", folder / "device-1.key")
    context.check_hostname = not any_host
    if newest is not None:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore"):  # that it is old is the point
            context.minimum_version = context.maximum_version = newest
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return secure.version()


@pytest.mark.parametrize("kind", KINDS)
def test_tls_of_another_age_is_refused(fleet: Fleet, kind: Kind) -> None:
    assert shake_hands(fleet.port(kind), fleet.keys, newest=ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.raises(ssl.SSLError, match="TLSV1_ALERT_PROTOCOL_VERSION"):
        shake_hands(fleet.port(kind), fleet.keys, newest=ssl.TLSVersion.TLSv1_1)


# Whom a device trusts.


def test_a_device_refuses_a_broker_of_another_ca(fleet: Fleet, tmp_path: Path) -> None:
    make_keys(tmp_path, ["device-1"])
    assert shake_hands(fleet.broker.port, fleet.keys) is not None
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed certificate in|local issuer"):
        shake_hands(fleet.broker.port, tmp_path)


def test_a_device_refuses_a_broker_with_a_certificate_for_another_host(own_fleet: Fleet) -> None:
    assert shake_hands(own_fleet.broker.port, own_fleet.keys) is not None
    make_keys(own_fleet.keys, [], ["broker.example.org"])
    own_fleet.broker.restart()
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        shake_hands(own_fleet.broker.port, own_fleet.keys)


def test_no_device_can_pass_for_the_broker(own_fleet: Fleet) -> None:
    """Not even before someone who does not look at the host."""
    assert shake_hands(own_fleet.broker.port, own_fleet.keys, any_host=True) is not None
    for kind in ("crt", "key"):
        shutil.copy(own_fleet.keys / f"device-2.{kind}", own_fleet.keys / "mosquitto" / f"broker.{kind}")
    own_fleet.broker.restart()
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        shake_hands(own_fleet.broker.port, own_fleet.keys, any_host=True)


# What a device may do.


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_writes_its_own_presence_and_replies(fleet: Fleet, kind: Kind) -> None:
    server, device = fleet.connect("server", kind), fleet.connect("device-1", kind)
    server.read("foreseed/1/d/+/here", "foreseed/1/d/+/up/+")
    device.say(f"{MINE}here", b"here")
    device.say(f"{MINE}up/0123abcd", b"reply")
    wait(lambda: len(server.got) == 2, server)
    assert server.got == [(f"{MINE}here", b"here"), (f"{MINE}up/0123abcd", b"reply")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_reads_its_own_orders_and_the_broadcast(fleet: Fleet, kind: Kind) -> None:
    server, device = fleet.connect("server", kind), fleet.connect("device-1", kind)
    server.say("foreseed/1/all", b"announce", retain=True)
    device.read("foreseed/1/all", f"{MINE}down/0123abcd")
    server.say(f"{MINE}down/0123abcd", b"order")
    wait(lambda: len(device.got) == 2, device)
    assert device.got == [("foreseed/1/all", b"announce"), (f"{MINE}down/0123abcd", b"order")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_will_of_a_device_that_dies_is_its_presence(fleet: Fleet, kind: Kind) -> None:
    server, device = fleet.connect("server", kind), fleet.client("device-1", kind)
    server.read("foreseed/1/d/+/here")
    device.will_set(f"{MINE}here", b"gone", 1, True)
    assert fleet.outcome(device, kind) == "connected"
    device.socket().close()
    wait(lambda: len(server.got) == 1, server)
    assert server.got == [(f"{MINE}here", b"gone")]


# What a device may not do.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [False, True])
def test_what_a_device_writes_elsewhere_reaches_nobody(fleet: Fleet, kind: Kind, retain: bool) -> None:
    server, device = fleet.connect("server", kind), fleet.connect("device-1", kind)
    server.read("foreseed/1/#")
    for topic in FORBIDDEN_TO_WRITE:
        device.say(topic, b"forged", retain)
    # What comes last is allowed: when it has arrived, all that was said before has arrived or never will.
    device.say(f"{MINE}up/0123abcd", b"mine", retain)
    wait(lambda: (f"{MINE}up/0123abcd", b"mine") in server.got, server)
    assert server.got == [(f"{MINE}up/0123abcd", b"mine")]
    # Control: the server can be reached on each of these topics.
    server.got.clear()
    for topic in FORBIDDEN_TO_WRITE:
        server.say(topic, b"true")
    wait(lambda: len(server.got) == len(FORBIDDEN_TO_WRITE), server)


@pytest.mark.parametrize("kind", KINDS)
def test_the_broker_says_no_to_a_client_that_can_hear_it(fleet: Fleet, kind: Kind) -> None:
    device = fleet.connect("device-1", kind, mqtt.MQTTv5)
    for topic in [*FORBIDDEN_TO_WRITE, "anything/else", "$SYS/broker/uptime", "$CONTROL/dynamic-security/v1"]:
        assert device.say(topic) == "Not authorized", topic
    assert device.say(f"{MINE}here") != "Not authorized"


@pytest.mark.parametrize("kind", KINDS)
def test_the_presence_of_another_device_cannot_be_cleared(fleet: Fleet, kind: Kind) -> None:
    fleet.connect("device-2", kind).say("foreseed/1/d/device-2/here", b"here", retain=True)
    fleet.connect("device-1", kind).say("foreseed/1/d/device-2/here", b"", retain=True)
    server = fleet.connect("server", kind)
    server.read("foreseed/1/d/+/here")
    wait(lambda: len(server.got) == 1, server)
    assert server.got == [("foreseed/1/d/device-2/here", b"here")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topic", ["foreseed/1/d/device-2/here", "foreseed/1/all"])
def test_a_last_will_elsewhere_reaches_nobody(fleet: Fleet, kind: Kind, topic: str) -> None:
    server, device = fleet.connect("server", kind), fleet.client("device-1", kind)
    server.read("foreseed/1/#")
    device.will_set(topic, b"forged", 1, True)
    if fleet.outcome(device, kind) == "connected":
        device.socket().close()
        wait(lambda: fleet.has_ended(device))
    server.say("foreseed/1/fence", b"true")
    wait(lambda: ("foreseed/1/fence", b"true") in server.got, server)
    assert server.got == [("foreseed/1/fence", b"true")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wildcard", [None, *WILDCARDS])
def test_a_device_reads_nothing_of_others(fleet: Fleet, kind: Kind, wildcard: str | None) -> None:
    topics = FORBIDDEN_TO_READ if wildcard is None else [wildcard]
    server, device = fleet.connect("server", kind), fleet.connect("device-1", kind)
    server.say("foreseed/1/d/device-2/here", b"retained", retain=True)
    server.say("foreseed/1/d/device-2/down/00000000", b"retained", retain=True)
    device.read(*topics, f"{MINE}down/0123abcd")
    for topic in FORBIDDEN_TO_READ:
        server.say(topic, b"not yours")
    server.say(f"{MINE}down/0123abcd", b"yours")
    wait(lambda: (f"{MINE}down/0123abcd", b"yours") in device.got, device)
    assert {topic for topic, _ in device.got} == {f"{MINE}down/0123abcd"}


@pytest.mark.parametrize("wildcard", [None, *WILDCARDS[:-2]])
def test_control_the_server_reads_all_that_a_device_does_not(fleet: Fleet, wildcard: str | None) -> None:
    server, reader = fleet.connect("server"), fleet.connect("server")
    reader.read(*(FORBIDDEN_TO_READ if wildcard is None else [wildcard]))
    for topic in FORBIDDEN_TO_READ:
        server.say(topic, b"all")
    expected = {topic for topic in FORBIDDEN_TO_READ if mqtt.topic_matches_sub(wildcard or topic, topic)}
    wait(lambda: {topic for topic, _ in reader.got} == expected, reader)
    assert expected


@pytest.mark.parametrize("claimed", ["server", "device-2"])
def test_the_certificate_decides_and_not_the_name_that_is_claimed(fleet: Fleet, claimed: str) -> None:
    server, device = fleet.connect("server"), fleet.client("device-1")
    device.username_pw_set(claimed, Identity(fleet.keys, claimed).password.read_text().strip())
    assert fleet.outcome(device, "certificate") == "connected"
    server.read("foreseed/1/#")
    device.say("foreseed/1/all", b"forged")
    device.say("foreseed/1/d/device-2/up/00000000", b"forged")
    device.say(f"{MINE}up/00000000", b"mine")
    wait(lambda: (f"{MINE}up/00000000", b"mine") in server.got, server)
    assert server.got == [(f"{MINE}up/00000000", b"mine")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_past_the_limit_ends_the_connection(fleet: Fleet, kind: Kind) -> None:
    server, device = fleet.connect("server", kind), fleet.connect("device-1", kind)
    server.read(f"{MINE}up/+")
    device.say(f"{MINE}up/00000000", bytes(512 << 10))
    wait(lambda: len(server.got) == 1, server)
    assert len(server.got[0][1]) == 512 << 10
    assert device.say(f"{MINE}up/00000000", bytes(520 << 10)) == "closed"


# The fleet changes while the broker runs.


def reload(fleet: Fleet) -> None:
    os.kill(fleet.broker.pid, signal.SIGHUP)


def test_a_new_device_gets_in_without_a_restart(own_fleet: Fleet) -> None:
    here = own_fleet.connect("server")
    make_keys(own_fleet.keys, ["device-3"])
    assert own_fleet.outcome(own_fleet.client("device-3"), "certificate") == "connected"
    assert own_fleet.outcome(own_fleet.client("device-3", "password"), "password") == "refused: Not authorized"
    reload(own_fleet)
    wait(lambda: own_fleet.outcome(own_fleet.client("device-3", "password"), "password") == "connected", here)
    assert here.state == "connected"


def test_a_device_whose_password_was_deleted_gets_in_no_more(own_fleet: Fleet) -> None:
    assert own_fleet.outcome(own_fleet.client("device-1", "password"), "password") == "connected"
    file = own_fleet.keys / "mosquitto" / "passwords"
    subprocess.run(["mosquitto_passwd", "-D", file, "device-1"], check=True, capture_output=True)
    reload(own_fleet)
    wait(lambda: own_fleet.outcome(own_fleet.client("device-1", "password"), "password") == "refused: Not authorized")
    assert own_fleet.outcome(own_fleet.client("device-2", "password"), "password") == "connected"


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_shut_out_is_heard_no_more_and_hears_nothing(own_fleet: Fleet, kind: Kind) -> None:
    server, device = own_fleet.connect("server"), own_fleet.connect("device-1", kind, mqtt.MQTTv5)
    device.read(f"{MINE}down/00000000", "foreseed/1/all")
    assert device.say(f"{MINE}here") != "Not authorized"
    # As the comment in the file says.
    acl = own_fleet.keys / "mosquitto" / "acl"
    acl.write_text(acl.read_text().replace("user server\n", "user device-1\ntopic deny #\n\nuser server\n"))
    reload(own_fleet)
    # At once, in the connection that it has.
    wait(lambda: device.say(f"{MINE}here") == "Not authorized", server)
    server.say(f"{MINE}down/00000000", b"order")
    server.say("foreseed/1/all", b"announce")
    other = own_fleet.connect("device-2", kind)
    other.read("foreseed/1/d/device-2/down/00000000")
    server.say("foreseed/1/d/device-2/down/00000000", b"order")
    wait(lambda: len(other.got) == 1, other)
    assert device.say(f"{MINE}here") == "Not authorized"
    assert device.got == []

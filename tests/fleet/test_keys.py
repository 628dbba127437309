"""Keys of a fleet: complete, private, added to without loss, and refused without a trace."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from foreseed.cli import main
from foreseed.fleet import keys as module
from foreseed.fleet.keys import HOSTS, Identity, KeysError, KeysResult, make_keys

ROOT = Path(__file__).parents[2]


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(before: dict[str, bytes], folder: Path) -> set[str]:
    after = contents(folder)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of two devices."""
    target = tmp_path / "keys"
    make_keys(target, ["device-0", "device-1"])
    return target


def test_a_new_folder_has_all_that_a_fleet_needs(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"
    assert make_keys(folder, ["a", "b.c_d-1"]) == KeysResult(("server", "a", "b.c_d-1"), (), HOSTS)
    names = {f"{name}.{kind}" for name in ("server", "a", "b.c_d-1") for kind in ("crt", "key", "password")}
    broker = {
        f"mosquitto/{name}" for name in ("acl", "broker.crt", "broker.key", "ca.crt", "foreseed.conf", "passwords")
    }
    device = {"a.conf", "b.c_d-1.conf", "foreseed-device.service"}
    assert set(contents(folder)) == names | broker | device | {"ca.crt", "ca.key", "mosquitto.conf"}
    assert (folder / "mosquitto" / "ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()


def test_only_the_owner_can_read(folder: Path) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_key_is_never_open_to_others_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        seen.append(stat.S_IMODE(Path(source).stat().st_mode))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    mask = os.umask(0)
    try:
        make_keys(tmp_path / "keys", ["device-0"])
        assert os.umask(0) == 0
    finally:
        os.umask(mask)
    assert set(seen) == {0o600}


@pytest.mark.parametrize("name", ["server", "device-0"])
def test_a_name_has_a_client_certificate_of_its_own_key(folder: Path, name: str) -> None:
    identity = Identity(folder, name)
    found, ca = certificate(identity.cert), certificate(identity.ca)
    assert [part.value for part in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [name]
    key = load_pem_private_key(identity.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp256r1"
    assert found.public_key() == key.public_key()
    found.verify_directly_issued_by(ca)
    usage = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_strict_verifier_takes_the_brokers_certificate_for_its_hosts_and_no_other(tmp_path: Path) -> None:
    hosts = ["Broker.Example.org", "192.168.1.10", "0:0::1"]
    assert make_keys(tmp_path / "keys", [], hosts).hosts == ("broker.example.org", "192.168.1.10", "::1")
    store = Store([certificate(tmp_path / "keys" / "ca.crt")])
    found = certificate(tmp_path / "keys" / "mosquitto" / "broker.crt")
    verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName("broker.example.org"))
    assert verifier.verify(found, [])[0] == found
    with pytest.raises(x509.verification.VerificationError):
        PolicyBuilder().store(store).build_server_verifier(x509.DNSName("localhost")).verify(found, [])


def test_certificates_last_as_long_as_asked(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["device-0"], days=7)
    for file in ("device-0.crt", "mosquitto/broker.crt"):
        left = certificate(tmp_path / "keys" / file).not_valid_after_utc - datetime.now(UTC)
        assert timedelta(6.9) < left <= timedelta(7)
        # A clock that is behind by a time zone does not shut a device out.
        assert certificate(tmp_path / "keys" / file).not_valid_before_utc < datetime.now(UTC) - timedelta(hours=23)


def test_nothing_outlives_its_ca(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, ["device-0"], days=3650)
    (folder / "device-0.crt").unlink()
    make_keys(folder, ["device-0"], days=3650)
    ends = {certificate(folder / file).not_valid_after_utc for file in ("ca.crt", "device-0.crt")}
    assert len(ends) == 1


def test_mosquitto_passwd_agrees_with_the_password_file(folder: Path, tmp_path: Path) -> None:
    """Its own tool upgrades plain passwords to hashes: hashes that it does not know would be hashed again."""
    file = folder / "mosquitto" / "passwords"
    before = file.read_text()
    assert [line.split(":")[0] for line in before.splitlines()] == ["server", "device-0", "device-1"]
    assert len({line.split("$")[3] for line in before.splitlines()}) == 3  # a salt each
    assert len({Identity(folder, name).password.read_text() for name in ("server", "device-0", "device-1")}) == 3
    subprocess.run(["mosquitto_passwd", "-D", file, "device-0"], check=True, capture_output=True)
    assert file.read_text() == "".join(line for line in before.splitlines(True) if not line.startswith("device-0:"))


def test_devices_are_added_and_all_else_is_left_alone(folder: Path) -> None:
    before = contents(folder)
    added = make_keys(folder, ["device-1", "device-2"])
    assert added == KeysResult(("device-2",), ("server", "device-1"), HOSTS)
    new = {f"device-2.{kind}" for kind in ("conf", "crt", "key", "password")}
    assert changed(before, folder) == new | {"mosquitto/passwords"}
    passwords = (folder / "mosquitto" / "passwords").read_text()
    assert passwords.startswith(before["mosquitto/passwords"].decode())
    certificate(folder / "device-2.crt").verify_directly_issued_by(certificate(folder / "ca.crt"))


def test_making_the_same_again_changes_nothing(folder: Path) -> None:
    before = contents(folder)
    again = make_keys(folder, ["device-0", "device-1"], list(HOSTS))
    assert again == KeysResult((), ("server", "device-0", "device-1"), HOSTS)
    assert changed(before, folder) == set()


def test_other_hosts_give_the_broker_a_new_certificate(folder: Path) -> None:
    before = contents(folder)
    assert make_keys(folder, [], ["broker.example.org"]).hosts == ("broker.example.org",)
    assert changed(before, folder) == {"mosquitto/broker.crt", "mosquitto/broker.key"}
    # They stay, as long as no others are asked for.
    assert make_keys(folder, []).hosts == ("broker.example.org",)


def test_a_changed_configuration_is_kept(folder: Path) -> None:
    (folder / "mosquitto" / "acl").write_text("user device-0\ntopic deny #\n")
    (folder / "mosquitto.conf").write_text("listener 1883\n")
    before = contents(folder)
    make_keys(folder, [])
    assert changed(before, folder) == set()


class Crash(BaseException):
    pass


def test_whatever_a_crash_left_out_is_made_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, write = 0, module.write_whole

    def crash_at(moment: int) -> None:
        nonlocal writes
        writes = 0

        def counted(path: Path, data: bytes) -> None:
            nonlocal writes
            writes += 1
            if writes == moment:
                raise Crash
            write(path, data)

        monkeypatch.setattr(module, "write_whole", counted)

    crash_at(0)
    make_keys(tmp_path / "whole", ["device-0"])
    complete = writes
    assert complete > 10
    for moment in range(1, complete + 1):
        folder = tmp_path / str(moment)
        crash_at(moment)
        with pytest.raises(Crash):
            make_keys(folder, ["device-0"])
        crash_at(0)
        make_keys(folder, ["device-0"])
        assert contents(folder).keys() == contents(tmp_path / "whole").keys()
        lines = (folder / "mosquitto" / "passwords").read_text().splitlines()
        assert sorted(line.split(":")[0] for line in lines) == ["device-0", "server"]
        for name in ("server", "device-0", "mosquitto/broker"):
            found = certificate(folder / f"{name}.crt")
            found.verify_directly_issued_by(certificate(folder / "ca.crt"))
            assert found.public_key() == load_pem_private_key((folder / f"{name}.key").read_bytes(), None).public_key()


def test_a_ca_made_again_from_its_key_is_the_same_ca(folder: Path) -> None:
    name = certificate(folder / "ca.crt").subject
    (folder / "ca.crt").unlink()
    make_keys(folder, [])
    assert certificate(folder / "ca.crt").subject == name
    certificate(folder / "device-0.crt").verify_directly_issued_by(certificate(folder / "ca.crt"))


@pytest.mark.parametrize(
    "name", ["", "-a", ".hidden", "a/b", "../a", "a b", "a+", "#", "é", "a\n", "a" * 65, "server", "ca", "%u"]
)
def test_a_bad_name_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeysError, match=r"^device name .*(expected 1 to 64|choose another)"):
        make_keys(tmp_path / "keys", ["fine", name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["", "mqtts://broker", "broker:8883", "a b", "-a", "a..b", "*.example.org", "a" * 64])
def test_a_bad_host_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(KeysError, match=r"^host .*expected a host name or an address alone"):
        make_keys(tmp_path / "keys", ["device-0"], ["localhost", host])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("days", [-1, 0, 3651])
def test_a_bad_time_is_refused_before_anything_is_made(tmp_path: Path, days: int) -> None:
    with pytest.raises(KeysError, match="1 to 3650 days"):
        make_keys(tmp_path / "keys", [], days=days)
    assert list(tmp_path.iterdir()) == []


def rsa_key() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def another_ca(folder: Path) -> bytes:
    make_keys(folder, [])
    return (folder / "ca.crt").read_bytes()


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("ca.key", lambda _: None, "holds files but no ca.key of ours; give a new folder"),
        ("ca.key", lambda _: b"nonsense", "damaged or not ours"),
        ("ca.key", lambda _: rsa_key(), "damaged or not ours"),
        ("ca.crt", lambda _: b"nonsense", "damaged or not ours"),
        ("ca.crt", another_ca, "ca.crt is not the certificate of ca.key"),
    ],
)
def test_a_folder_that_is_not_ours_is_left_as_it_is(folder: Path, tmp_path: Path, file, damage, said) -> None:  # type: ignore[no-untyped-def]
    data = damage(tmp_path / "other")
    (folder / file).unlink()
    if data is not None:
        (folder / file).write_bytes(data)
    before = contents(folder)
    with pytest.raises(KeysError, match=said):
        make_keys(folder, ["device-2"])
    assert changed(before, folder) == set()


def test_a_damaged_broker_certificate_is_said(folder: Path) -> None:
    (folder / "mosquitto" / "broker.crt").write_bytes(b"nonsense")
    before = contents(folder)
    with pytest.raises(KeysError, match=r"broker\.crt: damaged or not ours; delete it"):
        make_keys(folder, ["device-2"])
    assert changed(before, folder) == set()


def test_a_ca_that_has_ended_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return datetime.now(tz) + timedelta(3651)

    monkeypatch.setattr(module, "datetime", Later)
    before = contents(folder)
    with pytest.raises(KeysError, match=r"the CA ended on \d{4}-\d\d-\d\d; make new keys"):
        make_keys(folder, ["device-2"])
    assert changed(before, folder) == set()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "keys"):
        with pytest.raises(KeysError, match="Not a directory; give a folder that you may write to"):
            make_keys(place, [])


def test_every_device_has_arguments_of_its_own_for_the_shipped_unit(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["roof", "cellar"], ["192.168.1.10"])
    make_keys(tmp_path / "six", ["roof"], ["::1"])
    shipped = (ROOT / "deploy" / "foreseed-device.service").read_bytes()
    assert (tmp_path / "keys" / "foreseed-device.service").read_bytes() == shipped
    roof, cellar = ((tmp_path / "keys" / f"{name}.conf").read_text() for name in ("roof", "cellar"))
    assert 'ARGUMENTS="--broker mqtts://192.168.1.10 --name roof --shard' in roof
    assert "--broker mqtts://192.168.1.10:8884 --name cellar" in cellar
    assert "--user cellar " in cellar
    assert "--broker mqtts://[::1] --name roof" in (tmp_path / "six" / "roof.conf").read_text()
    (tmp_path / "keys" / "roof.conf").write_text("changed")
    make_keys(tmp_path / "keys", ["roof"])
    assert (tmp_path / "keys" / "roof.conf").read_text() == "changed"


def test_the_command_makes_keys_and_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my keys"
    options = ["--device", "roof", "--count", "2", "--host", "::1", "--host", "broker.example.org", "--days", "30"]
    assert main(["fleet", "keys", str(folder), *options]) == 0
    said = capsys.readouterr().out
    assert "made: server, roof, device-0, device-1\n" in said
    assert "for ::1, broker.example.org\n" in said
    assert f"  /usr/sbin/mosquitto -c '{folder}/mosquitto.conf'\n" in said
    assert f"  foreseed serve EXPERIMENT.toml --broker mqtts://[::1] --ca '{folder}/ca.crt'" in said
    assert (
        f"--name roof --shard FILE --ca '{folder}/ca.crt' --cert '{folder}/roof.crt' --key '{folder}/roof.key'" in said
    )
    assert main(["fleet", "keys", str(folder), "--count", "20"]) == 0
    said = capsys.readouterr().out
    assert "made: device-2, device-3, device-4, ... 14 more ..., device-19\n" in said
    assert "left alone, they have their keys: server, device-0, device-1\n" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--count", "0"], "--count 0: expected 1 to 100000 devices"),
        (["--count", "100001"], "--count 100001: expected 1 to 100000 devices"),
        (["--device", "a/b"], "device name 'a/b'"),
        (["--host", "mqtts://broker"], "host 'mqtts://broker'"),
        (["--days", "0"], "0 days"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "keys", str(tmp_path / "keys"), *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"foreseed: {said}")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "keys", "--help"]) == 0
    assert "Example: foreseed fleet keys keys --count 10" in capsys.readouterr().out


# NATS.


def test_three_hosts_are_the_nodes_of_a_cluster_which_differ_in_their_names_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["board"], ["a.lan", "b.lan", "::2"], for_nats=True)
    nodes = {
        path.stem: path.read_text() for path in (tmp_path / "keys" / "nats").glob("*.conf") if path.stem != "users"
    }
    assert set(nodes) == {"a.lan", "b.lan", "--2"}
    assert len({re.sub('(?m)^server_name: ".*"$', "", text) for text in nodes.values()}) == 1
    assert re.findall("@(.*):6222", nodes["a.lan"]) == ["a.lan", "b.lan", "[::2]"]
    assert "stream_replicas: 3" in nodes["a.lan"]
    assert "--broker mqtts://a.lan,b.lan,[::2] " in (tmp_path / "keys" / "board.conf").read_text()
    # A node more changes the files of all, and the certificate that they know each other by.
    before = (tmp_path / "keys" / "nats" / "node.crt").read_bytes()
    make_keys(tmp_path / "keys", [], ["a.lan", "b.lan", "::2", "d.lan"])
    again = [path.read_text() for path in (tmp_path / "keys" / "nats").glob("*.conf") if path.stem != "users"]
    assert [text.count("nats-route://") for text in again] == [4] * 4
    assert len(set(re.findall("node:(.*)@", "".join(again)))) == 1
    assert (tmp_path / "keys" / "nats" / "node.crt").read_bytes() != before


def test_names_of_one_machine_are_one_node(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", [], for_nats=True)
    (node,) = (path for path in (tmp_path / "keys" / "nats").glob("*.conf") if path.stem != "users")
    assert "nats-route://" not in node.read_text()
    assert "stream_replicas: 1" in node.read_text()


def test_nats_learns_of_every_name_and_who_was_shut_out_stays_so(tmp_path: Path) -> None:
    keys, users = tmp_path / "keys", tmp_path / "keys" / "nats" / "users.conf"

    def known() -> list[str]:
        return re.findall('CN=(.*?)"', users.read_text())

    make_keys(keys, ["one", "two"])
    make_keys(keys, ["three"], for_nats=True)
    assert known() == ["one", "server", "two", "three"]
    users.write_text(re.sub('.*CN=one".*\n', "", users.read_text()))
    make_keys(keys, ["one", "four"])
    assert known() == ["server", "two", "three", "four"]


def test_a_name_that_nats_would_take_for_several_steps_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "mosquitto", ["board.7"])
    with pytest.raises(KeysError, match=r"board\.7.*use - or _ instead"):
        make_keys(tmp_path / "nats", ["board.7"], for_nats=True)
    assert not (tmp_path / "nats").exists()

"""Keys for a trial fleet: a CA, the broker's certificate, and an identity for the server and for every device.

A folder of keys holds `ca.crt` and `ca.key`; for `server` and each device `NAME.crt`, `NAME.key` and `NAME.password`;
`mosquitto/`, all that the broker's machine needs; and `mosquitto.conf`, which runs the broker on the folder itself.
`foreseed-device.service` and each device's `NAME.conf` are what systemd starts the device with. Where it was asked for,
`nats/` holds all that the machines of a NATS cluster need.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
import pwd
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from foreseed.engine.errors import ForeseedError
from foreseed.engine.files import write_whole
from foreseed.fleet import nats
from foreseed.wire import NAMES, is_name

SERVER = "server"
HOSTS = nats.THIS_MACHINE
INSTALLED = "/etc/mosquitto/foreseed"
"""Where the shipped configuration expects what is in `mosquitto/`."""

_RESERVED = (SERVER, "ca", "mosquitto", "nats")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_MAX_DAYS = 3650
_SERVES, _IS_SERVED = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
# Passwords are 24 random bytes, which no number of iterations makes harder to guess; this is mosquitto's own.
_ITERATIONS = 101


class KeysError(ForeseedError):
    """Keys that cannot be made as asked; unless the disk itself failed, nothing was changed."""


class Identity:
    """The files with which one name shows who it is."""

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        self.name = name
        self.ca = Path(folder) / "ca.crt"
        self.cert, self.key, self.password = (Path(folder) / f"{name}.{kind}" for kind in ("crt", "key", "password"))

    @property
    def complete(self) -> bool:
        return self.cert.exists() and self.key.exists() and self.password.exists()


@dataclass(frozen=True)
class KeysResult:
    """What `make_keys` did."""

    made: tuple[str, ...]
    kept: tuple[str, ...]
    """Names that had their keys already; they were left alone."""
    hosts: tuple[str, ...]
    """The broker's certificate is for these."""


def make_keys(
    folder: str | os.PathLike[str],
    names: Sequence[str],
    hosts: Sequence[str] | None = None,
    days: int = 365,
    for_nats: bool = False,
) -> KeysResult:
    """Make what is missing in a folder of keys: CA, broker, server, and these devices.

    A folder that exists keeps its CA and its names. The broker's certificate is made anew for other `hosts`. `for_nats`
    adds what NATS needs; three hosts or more are the nodes of a cluster. Everything is checked before anything is
    written; only the owner can read what is written.
    """
    target = Path(folder)
    for_nats = for_nats or (target / "nats").exists()
    if for_nats and (dotted := [name for name in names if "." in name]):
        raise KeysError(f"device name {dotted[0]!r}: NATS takes a dot for a step in a topic; use - or _ instead")
    identities = [Identity(target, name) for name in dict.fromkeys((SERVER, *map(_checked_name, names)))]
    wanted_hosts = None if hosts is None else tuple(dict.fromkeys(map(_checked_host, hosts)))
    if not 1 <= days <= _MAX_DAYS:
        raise KeysError(f"{days} days: certificates are valid for 1 to {_MAX_DAYS} days")
    try:
        authority = _Authority.open(target)
        present_hosts = _hosts_of(target / "mosquitto" / "broker.crt")
        for_hosts = wanted_hosts or present_hosts or HOSTS
        missing = [identity for identity in identities if not identity.complete]
        until = datetime.now(UTC) + timedelta(days)
        with _owner_only():
            authority.save(target)
            if for_nats:
                _add_users(target, [identity.name for identity in missing])
            if set(for_hosts) != set(present_hosts):
                _certify_host(target / "mosquitto" / "broker.crt", authority, [_SERVES], for_hosts, until)
            if missing:
                _make_identities(target, authority, missing, until)
            devices = [identity.name for identity in identities if identity.name != SERVER]
            _configure(target, devices, for_hosts if for_nats and nats.is_cluster(for_hosts) else for_hosts[:1])
            if for_nats:
                _make_nodes(target, authority, for_hosts, until)
    except OSError as error:
        raise KeysError(f"{error.filename}: {error.strerror}; give a folder that you may write to") from None
    made = dict.fromkeys(identity.name for identity in missing)
    kept = tuple(identity.name for identity in identities if identity.name not in made)
    return KeysResult(tuple(made), kept, for_hosts)


class _Authority:
    """The CA; what it signs ends with it at the latest."""

    def __init__(self, key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.key, self.certificate = key, certificate

    @staticmethod
    def open(folder: Path) -> _Authority:
        """The folder's CA, or a new one for a folder that is empty or not there."""
        key_file, file = folder / "ca.key", folder / "ca.crt"
        if not key_file.exists():
            if folder.exists() and any(folder.iterdir()):
                raise KeysError(f"{folder}: holds files but no ca.key of ours; give a new folder, or one with keys")
            key = generate_private_key(SECP256R1())
            return _Authority(key, _self_signed(key))
        try:
            key = _read_key(key_file)
            authority = _Authority(
                key, x509.load_pem_x509_certificate(file.read_bytes()) if file.exists() else _self_signed(key)
            )
        except (ValueError, TypeError):
            raise KeysError(f"{folder}: ca.key and ca.crt are damaged or not ours; give a new folder") from None
        if authority.certificate.public_key() != key.public_key():
            raise KeysError(f"{folder}: ca.crt is not the certificate of ca.key; give a new folder")
        if authority.certificate.not_valid_after_utc < datetime.now(UTC):
            ended = f"{authority.certificate.not_valid_after_utc:%Y-%m-%d}"
            raise KeysError(f"{folder}: the CA ended on {ended}; make new keys in a new folder")
        return authority

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The key first: a folder that has it is ours, whatever else a crash has left out.
        for path, item in (
            (folder / "ca.key", self.key),
            (folder / "ca.crt", self.certificate),
            (folder / "mosquitto" / "ca.crt", self.certificate),
        ):
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                write_whole(path, _pem(item))

    def sign(
        self,
        key: EllipticCurvePrivateKey,
        name: str,
        usage: Sequence[ObjectIdentifier],
        until: datetime,
        hosts: Sequence[str] = (),
    ) -> x509.Certificate:
        """A certificate for its purpose only, so that no device can pass for the broker."""
        issuer = self.certificate
        builder = (
            _builder(name, key, issuer.subject, min(until, issuer.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, hosts))), False)
        return builder.sign(self.key, SHA256())


def _self_signed(key: EllipticCurvePrivateKey) -> x509.Certificate:
    # Named after its key: made again from the key, it is the CA of the same certificates.
    name = f"foreseed CA {x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:8]}"
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        _builder(name, key, issuer, datetime.now(UTC) + timedelta(_MAX_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, SHA256())
    )


def _builder(name: str, key: EllipticCurvePrivateKey, issuer: x509.Name, until: datetime) -> x509.CertificateBuilder:
    # Boards' clocks may be behind by their time zone: a certificate is valid since yesterday.
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(1))
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _certify_host(
    file: Path, authority: _Authority, usage: Sequence[ObjectIdentifier], hosts: Sequence[str], until: datetime
) -> None:
    key = generate_private_key(SECP256R1())
    certificate = authority.sign(key, f"foreseed {file.stem}", usage, until, hosts)
    # A certificate that is not there is made anew the next time; one with another's key would stay.
    file.unlink(missing_ok=True)
    write_whole(file.with_suffix(".key"), _pem(key))
    write_whole(file, _pem(certificate))


def _make_identities(folder: Path, authority: _Authority, identities: Sequence[Identity], until: datetime) -> None:
    passwords = {identity.name: secrets.token_urlsafe(24) for identity in identities}
    # The broker knows a password before its owner does: whatever a crash leaves out is made anew the next time.
    _add_passwords(folder / "mosquitto" / "passwords", passwords)
    for identity in identities:
        key = generate_private_key(SECP256R1())
        certificate = authority.sign(key, identity.name, [_IS_SERVED], until)
        identity.cert.unlink(missing_ok=True)
        write_whole(identity.key, _pem(key))
        write_whole(identity.password, f"{passwords[identity.name]}\n".encode())
        write_whole(identity.cert, _pem(certificate))


def _add_passwords(file: Path, passwords: dict[str, str]) -> None:
    present = file.read_text().splitlines() if file.exists() else []
    others = [line for line in present if line.partition(":")[0] not in passwords]
    lines = [*others, *(f"{name}:{_hashed(password)}" for name, password in passwords.items())]
    write_whole(file, "".join(f"{line}\n" for line in lines).encode())


def _add_users(folder: Path, names: Sequence[str]) -> None:
    """Tell NATS of new names; all that have keys, if it knows nobody yet. Who was shut out stays so."""
    file = folder / "nats" / "users.conf"
    file.parent.mkdir(exist_ok=True)
    lines = nats.user_lines(file.read_text()) if file.exists() else {}
    known = [] if lines else sorted(path.stem for path in folder.glob("*.crt") if path.stem != "ca")
    for name in (*known, *names):
        lines[name] = nats.server_line(name) if name == SERVER else nats.device_line(name)
    write_whole(file, nats.users(lines.values()).encode())


def _make_nodes(folder: Path, authority: _Authority, hosts: Sequence[str], until: datetime) -> None:
    """The files of NATS: the broker's certificate, one with which nodes know each other, and each node's settings."""
    target = folder / "nats"
    for name in ("ca.crt", "broker.crt", "broker.key"):
        write_whole(target / name, (folder / "mosquitto" / name).read_bytes())
    if set(_hosts_of(target / "node.crt")) != set(hosts):
        _certify_host(target / "node.crt", authority, [_SERVES, _IS_SERVED], hosts, until)
    files = nats.configurations(hosts, secrets.token_urlsafe(24))
    # All or none: nodes know each other's hosts, and the password.
    if not all((target / name).exists() for name in files):
        for name, text in files.items():
            write_whole(target / name, text.encode())


def _hashed(password: str) -> str:
    """A password as mosquitto keeps it: PBKDF2 with SHA-512."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
    return f"$7${_ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def _configure(folder: Path, devices: Sequence[str], hosts: Sequence[str]) -> None:
    """Write the broker's and the devices' configuration where there is none: its owner may have changed it."""
    shipped = resources.files("foreseed") / "deploy"
    broker, device = ((shipped / name).read_text() for name in ("mosquitto/mosquitto.conf", "device.conf"))
    here = broker.replace(INSTALLED, str((folder / "mosquitto").resolve()))
    here = here.replace("user mosquitto\n", f"user {_current_user()}\n")
    device = device.replace("broker.example.org", ",".join(f"[{host}]" if ":" in host else host for host in hosts))
    for path, text in (
        (folder / "mosquitto" / "acl", (shipped / "mosquitto" / "acl").read_text()),
        (folder / "mosquitto" / "foreseed.conf", broker),
        (folder / "mosquitto.conf", here),
        (folder / "foreseed-device.service", (shipped / "foreseed-device.service").read_text()),
        *((folder / f"{name}.conf", device.replace("device-0", name)) for name in devices),
    ):
        if not path.exists():
            write_whole(path, text.encode())


def _current_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name; the broker only needs one if started by root
        return "root"


@contextmanager
def _owner_only() -> Iterator[None]:
    # Before a file exists: one that is closed to others afterwards could be read in between.
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _read_key(path: Path) -> EllipticCurvePrivateKey:
    key = load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("not an elliptic curve key")
    return key


def _pem(item: EllipticCurvePrivateKey | x509.Certificate) -> bytes:
    if isinstance(item, x509.Certificate):
        return item.public_bytes(Encoding.PEM)
    return item.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _hosts_of(file: Path) -> tuple[str, ...]:
    """The hosts of a broker's certificate; none if there is no certificate, or no key for it."""
    if not file.exists() or not file.with_suffix(".key").exists():
        return ()
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        raise KeysError(f"{file}: damaged or not ours; delete it, and it is made again") from None
    return tuple(str(name.value) for name in names)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _checked_name(name: str) -> str:
    if not is_name(name):
        raise KeysError(f"device name {name!r}: expected {NAMES}")
    if name in _RESERVED:
        raise KeysError(f"device name {name!r} is taken by the fleet itself; choose another")
    return name


def _checked_host(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not all(map(_LABEL.fullmatch, host.split("."))):
        raise KeysError(
            f"host {host!r}: expected a host name or an address alone, such as broker.example.org or 192.168.1.10"
        )
    return host.lower()

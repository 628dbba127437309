"""The link to an MQTT broker, for devices and the server: it keeps itself up. A device loads this module.

MQTT 3.1.1, clean sessions: a connection knows nothing of the one before it. Messages go with QoS 1; to a cluster, those
that are not retained with QoS 0.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
import time

from foreseed.engine.errors import ForeseedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from paho.mqtt.client import Client, MQTTMessage, MQTTMessageInfo

Publication = tuple[str, bytes, bool]
"""Topic, payload, and whether the broker retains it."""


class LinkError(ForeseedError):
    """A broker that cannot be used as asked: a wrong address, unreadable credentials, or a refusal."""


def _paho() -> ModuleType:
    """The MQTT client without what it loads for proxies, web sockets, logs and the like: a device is 4 MB smaller.

    Nothing here uses those, and paho looks for proxies only if it finds `socks`. Modules that are loaded already cost
    nothing and stay; whoever imports one of the others later gets the real one.
    """
    names = ("logging", "platform", "urllib.parse", "urllib.request", "uuid")
    left_out: dict[str, Any] = {name: type(sys)(name) for name in names if name not in sys.modules}
    if "logging" in left_out:
        vars(left_out["logging"]).update(DEBUG=10, INFO=20, WARNING=30, ERROR=40)  # paho makes a table of them
    if "platform" in left_out:
        left_out["platform"].system = lambda: "Windows" if os.name == "nt" else os.name
    left_out |= {"socks": None, "dns": None}  # as if they were not installed
    before = {name: sys.modules[name] for name in left_out if name in sys.modules}
    sys.modules.update(left_out)
    try:
        import paho.mqtt.client
    finally:
        for name in left_out:
            del sys.modules[name]
        sys.modules.update(before)
    return paho.mqtt.client


_mqtt = _paho()
_PORTS = {"mqtts": 8883, "mqtt": 1883}
_PUNCTUATION = str.maketrans("", "", "-._")
_KEEP_ALIVE = 30
"""Seconds without a word after which the two ends ask each other; a dead device's will comes after 1.5 times that."""
_CONNECT_TIMEOUT = 10.0
_STOP_TIMEOUT = 5.0
"""Seconds that a stop waits for the acknowledgement of the last messages, and for the thread."""
_FIRST_RETRY, _LONGEST_RETRY = 0.2, 60.0
_STABLE_AFTER = 1.0
"""Seconds that a connection has to last for the next one to be tried as soon as after a first failure."""
_STACK_BYTES = 256 << 10
_CLOSE_WAIT = 8
_REFUSED = (134, 135)
"""Wrong user name or password, not authorised: the broker will say the same until somebody puts it right."""
_CERTIFICATE_ERRORS = {
    9: "its certificate is not valid yet; set this machine's clock",
    10: "its certificate has expired; renew it, or set this machine's clock",
    62: "its certificate is for another host; use a host name that stands in it, or make one for this name",
}
_CERTIFICATE_ERRORS[64] = _CERTIFICATE_ERRORS[62]
for _code in (2, 18, 19, 20, 21):
    _CERTIFICATE_ERRORS[_code] = "its certificate is of an authority unknown here; give its --ca"


class Broker:
    """Where a broker is, or each node of its cluster, and how to show who one is."""

    __slots__ = ("addresses", "password", "tls", "user")

    def __init__(
        self, addresses: tuple[tuple[str, int], ...], tls: ssl.SSLContext | None, user: str, password: str
    ) -> None:
        """`addresses` are hosts and ports, any of which will do."""
        self.addresses, self.tls, self.user, self.password = addresses, tls, user, password

    def __str__(self) -> str:
        return ",".join(map(self.url, self.addresses))

    @property
    def qos(self) -> int:
        """Of messages that are not retained: 0 in a cluster, whose nodes would have to agree on each of them first."""
        return 0 if len(self.addresses) > 1 else 1

    def url(self, address: tuple[str, int]) -> str:
        """One of the addresses, as a user writes it."""
        host, port = address
        return f"{'mqtts' if self.tls else 'mqtt'}://{f'[{host}]' if ':' in host else host}:{port}"


def broker(
    urls: str,
    *,
    ca: str = "",
    cert: str = "",
    key: str = "",
    user: str = "",
    password_file: str = "",
    insecure: bool = False,
) -> Broker:
    """The broker at a URL such as mqtts://host:8883, with all checked that can be checked before connecting.

    The nodes of a cluster are several URLs with commas between; one without a scheme has the first one's. `ca` is the
    file of the only authority to trust (the system's are taken without it, at the cost of some memory), `cert` and
    `key` show who one is, or `user` and `password_file`. `insecure` allows mqtt://, which is without encryption, to a
    host other than this one.
    """
    addresses, tls = _addresses(urls)
    if not tls and not insecure and not all(_is_loopback(host) for host, _ in addresses):
        raise LinkError(f"{urls}: mqtt:// sends everything in plain text; use mqtts://, or ask for it with --insecure")
    if not tls and (ca or cert or key):
        raise LinkError(f"{urls}: mqtt:// has no use for {ca or cert or key}; use mqtts://, or leave certificates out")
    if bool(user) != bool(password_file):
        raise LinkError(f"a {'user name' if user else 'password file'} alone; give both --user and --password-file")
    password = _password(password_file) if password_file else ""
    return Broker(addresses, _context(ca, cert, key) if tls else None, user, password)


def _addresses(urls: str) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Every host and port, and whether there is TLS."""
    if "@" in urls:
        # The URL is not shown: this message may land in a log.
        raise LinkError("the broker's URL holds a name or password, for all to see; use --user and --password-file")
    first, *others = urls.split(",")
    scheme, separator, _ = first.partition("://")
    found = [_address(first), *(_address(url if "://" in url else f"{scheme}{separator}{url}") for url in others)]
    if len({tls for _, _, tls in found}) > 1:
        raise LinkError(f"{urls}: mqtt:// and mqtts:// in one list; give all nodes of a cluster alike")
    return tuple({(host, port): None for host, port, _ in found}), found[0][2]


def _address(url: str) -> tuple[str, int, bool]:
    scheme, _, rest = url.partition("://")
    place = rest.removesuffix("/")
    host, colon, port = place.rpartition(":") if ":" in place and not place.endswith("]") else (place, "", "")
    bracketed = host.startswith("[")
    host = host[1:-1] if bracketed else host
    named = _packed(socket.AF_INET6, host) if bracketed else host.isascii() and host.translate(_PUNCTUATION).isalnum()
    number = int(port) if port.isdecimal() else 0 if colon else _PORTS.get(scheme, 0)
    if scheme not in _PORTS or not named or not 0 < number < 65536:
        raise LinkError(f"broker {url!r}: expected mqtts://host or mqtts://host:port, or mqtt:// for plain text")
    return host, number, scheme == "mqtts"


def _is_loopback(host: str) -> bool:
    ipv4, ipv6 = _packed(socket.AF_INET, host), _packed(socket.AF_INET6, host)
    return host == "localhost" or ipv4.startswith(b"\x7f") or ipv6 == bytes(15) + b"\x01"


def _packed(family: int, host: str) -> bytes:
    try:
        return socket.inet_pton(family, host)
    except OSError:
        return b""


def _password(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            password = file.read(65536).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise LinkError(f"{path}: cannot read the password ({why}); check --password-file") from None
    if not password or "\n" in password or len(password.encode()) > 65535:
        raise LinkError(f"{path}: expected a password and nothing else, on one line; check --password-file")
    return password


def _context(ca: str, cert: str, key: str) -> _Context:
    if bool(cert) != bool(key):
        raise LinkError(f"{cert or key}: a certificate takes its key, and a key its certificate; give --cert and --key")
    context = _Context(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificate and host name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in filter(None, (ca, cert, key)):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise LinkError(f"{path}: cannot read it ({error.strerror}); check --ca, --cert and --key") from None
    try:
        if ca:
            context.load_verify_locations(ca)
        else:
            context.load_default_certs()
    except ssl.SSLError:
        raise LinkError(f"{ca}: no certificate in PEM format; check --ca") from None
    try:
        if cert:
            # An empty password, since OpenSSL would ask on the terminal for that of an encrypted key.
            context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError):
        raise LinkError(f"{cert}, {key}: no certificate and its unencrypted key, in PEM format") from None
    return context


class _Context(ssl.SSLContext):
    """Closes a connection whose handshake fails, which paho leaves to the garbage collector."""

    def wrap_socket(self, sock: socket.socket, *args: Any, **options: Any) -> ssl.SSLSocket:
        secure = super().wrap_socket(sock, *args, **options)
        try:
            secure.do_handshake()
        except BaseException:
            secure.close()
            raise
        return secure


class Link:
    """A connection to a broker that is made again, for as long as it takes, whenever it breaks.

    Of several addresses any will do: they are tried in a random order, so that devices spread over the nodes of a
    cluster, and those of a node that is lost over the others.

    `received`, `connected` and `failed` are called from the link's own thread and must be quick: put what they say
    into a queue.
    """

    def __init__(
        self,
        broker: Broker,
        client_id: str,
        subscriptions: list[str],
        *,
        received: Callable[[str, bytes], None],
        connected: Callable[[], None],
        failed: Callable[[LinkError], None],
        say: Callable[[str], None],
        will: tuple[str, bytes] | None = None,
        quiet: float | None = None,
    ) -> None:
        """Nothing is done before `start`.

        `received(topic, payload)` gets the messages of the `subscriptions`. `connected()` follows each connection,
        once the broker has acknowledged the subscriptions. `failed(error)` ends the link: the broker, each node of it,
        refused us before it ever let us in (afterwards it may be its own mistake, and the link waits). `say(line)`
        tells a user about troubles and their end, one line for each. The `will` (topic, payload) is retained; the
        broker publishes it if this process vanishes. After `quiet` seconds without a message a link to a cluster
        subscribes anew, and so hears what is retained: a node that has just come back may not have had it when it was
        published.
        """
        self._broker, self._client_id, self._subscriptions, self._will = broker, client_id, subscriptions, will
        self._received, self._connected, self._failed, self._say = received, connected, failed, say
        self._quiet = quiet if len(broker.addresses) > 1 else None
        self._heard = 0.0
        """When a message came last, or was last asked for."""
        self._client: Client | None = None
        self._connected_since: float | None = None
        self._was_connected = self._is_refused = False
        self._log_error = self._refusal = ""
        self._address = "", 0
        """The one that was tried last."""
        self._troubles: list[str] = []
        """What is wrong with the addresses tried since the last connection, or since all were tried."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"link {client_id}", daemon=True)
        self._count_lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed_sent = self._closed_received = 0

    def start(self) -> None:
        """Connect, and keep connected, in a thread; returns at once."""
        # The usual 8 MB of address space would count against a device's limit on it.
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> MQTTMessageInfo | None:
        """Send a message, from any thread.

        It is dropped if there is no connection, and lost with a connection that breaks before the acknowledgement:
        whoever published says again after `connected` what still matters.
        """
        client = self._client
        if client is None or self._connected_since is None:
            return None
        return client.publish(topic, payload, 1 if retain else self._broker.qos, retain)

    def stop(self, *last: Publication) -> None:
        """Publish the last messages, if there is a connection, and end it without the will."""
        self._wait_for_acks([self.publish(*message) for message in last])
        self._stopping.set()
        client = self._client
        if client is not None:
            client.disconnect()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, with all subscriptions, at this moment."""
        return self._connected_since is not None

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received in TCP segments so far, TLS and MQTT framing included, over all connections.

        Counted by the system for connections whose TLS handshake went well; on others than Linux both are 0.
        """
        with self._count_lock:
            sent, received = _tcp_bytes(self._socket) if self._socket else (0, 0)
            return self._closed_sent + sent, self._closed_received + received

    def _wait_for_acks(self, published: list[MQTTMessageInfo | None]) -> None:
        end = time.monotonic() + _STOP_TIMEOUT
        for info in published:
            while info and not info.rc and not info.is_published() and self._connected_since and time.monotonic() < end:
                info.wait_for_publish(0.05)

    def _run(self) -> None:
        failures, last_told = 0, ""
        while not self._stopping.is_set():
            self._troubles, refused = [], []
            # The one that was lost comes last.
            lost = self._address
            for address in sorted(self._broker.addresses, key=lambda one: (one == lost, os.urandom(4))):
                self._address = address
                reason, lasted = self._connect_once()
                self._troubles.append(f"{self._broker.url(self._address)}: {reason}")
                refused.append(self._is_refused)
                if lasted is not None or self._stopping.is_set():
                    break
            troubles = "; ".join(sorted(self._troubles))
            if all(refused) and not self._was_connected and not self._stopping.is_set():
                return self._failed(LinkError(troubles))
            if lasted is not None:
                last_told, troubles = "", self._troubles[-1]
            failures = 1 if lasted is not None and lasted >= _STABLE_AFTER else failures + 1
            if troubles != last_told and not self._stopping.is_set():
                self._say(f"{troubles}; trying again")
                last_told = troubles
            soon = min(_FIRST_RETRY * 2 ** min(failures - 1, 20), _LONGEST_RETRY)
            delay = _LONGEST_RETRY if all(refused) else soon
            # A fleet that lost its broker at one moment does not come back at one.
            self._stopping.wait(delay * (0.5 + os.urandom(1)[0] / 510))

    def _connect_once(self) -> tuple[str, float | None]:
        """One connection, from its start to its end: why it ended, and how many seconds it was of use."""
        # A new client each time: paho's would send again what was left over, and owners say it again anyway.
        client = self._client = self._new_client()
        self._log_error, self._refusal, self._is_refused = "", "", False
        host, port = self._address
        try:
            # As bytes: a str would load the tables of international names, 0.4 MB.
            client.connect(host.encode(), port, _KEEP_ALIVE)  # type: ignore[arg-type]
            if self._stopping.is_set():
                client.disconnect()
            while client.loop(_KEEP_ALIVE / 6 if self._quiet is None else min(_KEEP_ALIVE / 6, self._quiet)) == 0:
                if self._quiet is not None and self.is_connected and time.monotonic() >= self._heard + self._quiet:
                    self._subscribe(client)
        except OSError as error:
            return self._refusal or self._reason(error), None
        finally:
            since, self._connected_since, self._client = self._connected_since, None, None
        if since is not None:
            return "the connection was lost", time.monotonic() - since
        wish = "a client certificate that it knows (--cert)" if self._broker.tls else "TLS (mqtts://)"
        return self._refusal or f"it accepts no connection, like a broker that asks for {wish}{self._log_error}", None

    def _new_client(self) -> Client:
        client: Client = _mqtt.Client(
            _mqtt.CallbackAPIVersion.VERSION2, self._client_id, protocol=_mqtt.MQTTv311, reconnect_on_failure=False
        )
        client.connect_timeout = _CONNECT_TIMEOUT
        client.max_inflight_messages_set(0)  # no limit: MQTT 3.1.1 has none, and a server writes to many at once
        if self._broker.tls is not None:
            client.tls_set_context(self._broker.tls)
        if self._broker.user:
            client.username_pw_set(self._broker.user, self._broker.password)
        if self._will is not None:
            client.will_set(*self._will, qos=1, retain=True)
        client.on_connect, client.on_subscribe, client.on_log = self._on_connect, self._on_subscribe, self._on_log
        client.on_socket_open, client.on_socket_close = self._on_socket_open, self._on_socket_close
        for topic in self._subscriptions:
            client.message_callback_add(topic, self._on_message)  # and no message else is heard
        # Paho writes from whichever thread publishes, and two would mix their packets, unless it believes that an
        # event loop of ours does the writing; `loop` does, and is woken.
        client.on_socket_register_write = lambda *_: None
        return client

    def _on_connect(self, client: Client, _: Any, flags: Any, reason: Any, properties: Any) -> None:
        # Only the log says why a broker hangs up on a client that it does not know; from here on it costs time.
        client.on_log = None
        if reason.value in _REFUSED:
            who = f"user {self._broker.user!r}" if self._broker.user else "this client"
            self._refusal, self._is_refused = f"it refused {who} ({reason}); check the credentials", True
        elif reason.is_failure:
            self._refusal = f"it refused the connection ({reason})"
        elif self._subscriptions:
            self._subscribe(client)
        else:
            self._set_connected()

    def _subscribe(self, client: Client) -> None:
        self._heard = time.monotonic()
        client.subscribe([(topic, self._broker.qos) for topic in self._subscriptions])

    def _on_subscribe(self, client: Client, _: Any, mid: int, reasons: list[Any], properties: Any) -> None:
        for topic, reason in zip(self._subscriptions, reasons, strict=False):
            if reason.is_failure:
                self._refusal, self._is_refused = f"it does not let this client read {topic}; check its ACL", True
                client.disconnect()
                return
        if not self.is_connected:
            self._set_connected()

    def _set_connected(self) -> None:
        self._connected_since, self._was_connected = time.monotonic(), True
        self._say("; ".join([*self._troubles, f"{self._broker.url(self._address)}: connected"]))
        self._connected()

    def _on_message(self, client: Client, _: Any, message: MQTTMessage) -> None:
        self._heard = time.monotonic()
        self._received(message.topic, bytes(message.payload))

    def _on_log(self, client: Client, _: Any, level: int, line: str) -> None:
        if level == _mqtt.LogLevel.MQTT_LOG_ERR:
            self._log_error = f" ({line})"

    def _on_socket_open(self, client: Client, _: Any, opened: Any) -> None:
        # A reply would wait up to 40 ms for the other end to acknowledge what was sent before it.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._count_lock:
            self._socket = opened

    def _on_socket_close(self, client: Client, _: Any, closing: Any) -> None:
        with self._count_lock:
            sent, received = _tcp_bytes(closing)
            self._closed_sent, self._closed_received = self._closed_sent + sent, self._closed_received + received
            self._socket = None

    def _reason(self, error: OSError) -> str:
        """What is wrong, and what to do, in words that stay the same while it lasts."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return _CERTIFICATE_ERRORS.get(error.verify_code, f"its certificate is refused: {error.verify_message}")
        if isinstance(error, ssl.SSLError):
            return f"TLS failed ({error.reason or 'it hung up'}); is it a TLS port, and does it know our certificate?"
        if isinstance(error, socket.gaierror):
            return f"the host name cannot be found ({error.strerror})"
        return f"it cannot be reached ({error.strerror or 'no answer'})"


def _tcp_bytes(connection: socket.socket) -> tuple[int, int]:
    """Bytes that this connection sent (again, where they were lost) and received."""
    if not hasattr(socket, "TCP_INFO"):
        return 0, 0
    # linux/tcp.h, struct tcp_info: tcpi_state at 0, tcpi_bytes_received at 128, tcpi_bytes_sent (Linux 4.19) at 200.
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
    sent, received = (int.from_bytes(info[start : start + 8], sys.byteorder) for start in (200, 128))
    # The other side's end of the connection counts as a byte there.
    return sent, received - (info[0] == _CLOSE_WAIT)

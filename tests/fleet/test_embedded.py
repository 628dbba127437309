"""The broker inside the process does what fleets need of a real one."""

import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from foreseed.fleet.embedded import EmbeddedBroker
from foreseed.transport.link import LinkError
from tests.transport.test_link import CLIENT, PATIENCE, Owner, eventually


@pytest.fixture
def embedded(capfd):
    with EmbeddedBroker() as running:
        yield running
    assert capfd.readouterr() == ("", ""), "the broker keeps quiet"


@pytest.fixture
def mortal(embedded):
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), embedded.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


def test_messages_pass_whole_and_in_order(embedded):
    sent = [bytes([i]) * (1 + 997 * i) for i in range(200)]
    with Owner(embedded.url, ["d/+/up"]).up() as reader, Owner(embedded.url, client_id="writer").up() as writer:
        for payload in sent:
            writer.link.publish("d/one/up", payload)
        assert [reader.next() for _ in sent] == [("d/one/up", payload) for payload in sent]


def test_retained_messages_greet_who_comes_later_and_can_be_withdrawn(embedded):
    with Owner(embedded.url, ["all"]).up() as owner:
        owner.link.publish("all", b"kept", retain=True)
        assert owner.next() == ("all", b"kept")
        with Owner(embedded.url, ["all"], client_id="late") as late:
            assert late.next() == ("all", b"kept")
        owner.link.publish("all", b"", retain=True)
        assert owner.next() == ("all", b"")
        with Owner(embedded.url, ["all"], client_id="later").up() as later:
            owner.link.publish("all", b"news")
            assert later.next() == ("all", b"news")


def test_the_will_of_a_killed_process_is_published_and_kept(embedded, mortal):
    with Owner(embedded.url, ["here"]).up() as watcher:
        mortal.send_signal(signal.SIGKILL)
        assert watcher.next() == ("here", b"gone")
        with Owner(embedded.url, ["here"], client_id="late") as late:
            assert late.next() == ("here", b"gone")


def test_a_clean_stop_delivers_the_last_words_and_no_will(embedded, mortal):
    with Owner(embedded.url, ["here", "end"]).up() as watcher:
        mortal.stdin.close()
        assert mortal.wait(PATIENCE) == 0
        assert watcher.next() == ("here", b"farewell")
        watcher.link.publish("end", b"")
        assert watcher.next() == ("end", b"")


def test_many_devices_come_at_once_and_each_hears_only_its_own(embedded):
    def hello(name):
        owner = Owner.__new__(Owner)
        owner._connected = lambda: owner.link.publish(f"d/{name}/here", name.encode(), retain=True)
        owner.__init__(embedded.url, [f"d/{name}/down"], client_id=name)
        return owner

    names = [f"device-{i}" for i in range(40)]
    with Owner(embedded.url, ["d/+/here"], client_id="server").up() as server:
        devices = [hello(name) for name in names]
        assert sorted(server.next()[1].decode() for _ in names) == sorted(names)
        for name in names:
            server.link.publish(f"d/{name}/down", name.encode())
        for name, device in zip(names, devices, strict=True):
            assert device.next() == (f"d/{name}/down", name.encode())
            device.link.stop()
        assert all(device.messages.empty() for device in devices)


def test_clients_outlive_the_broker_and_find_the_next_one():
    with EmbeddedBroker() as first:
        owner = Owner(first.url, ["x"]).up()
    with owner:
        eventually(lambda: "lost" in owner.lines[1] if len(owner.lines) > 1 else False)
        with EmbeddedBroker(int(first.url.rpartition(":")[2])) as second:
            assert second.url == first.url
            owner.up(2).link.publish("x", b"again")
            assert owner.next() == ("x", b"again")
            owner.link.stop()


def test_nothing_is_left_after_the_end():
    with EmbeddedBroker() as running:
        pass
    running.close()
    assert "embedded broker" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])))


def test_other_machines_cannot_reach_it(embedded):
    port = int(embedded.url.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    # Were it listening on all of this machine's addresses, this one would be among them.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(LinkError, match=rf"port {port} cannot be had .*choose another"):
            EmbeddedBroker(port)


def test_a_port_that_is_none_is_told():
    with pytest.raises(LinkError, match="port 65536 cannot be had"):
        EmbeddedBroker(65536)


def test_without_amqtt_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "amqtt.broker", None)
    with pytest.raises(LinkError, match="pip install amqtt"):
        EmbeddedBroker()

import hashlib
import socket

import pytest

from foreseed.data import DataError
from foreseed.data.download import TRIES, fetch


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "cache" / "set.tar.gz"


def part_of(target):
    return target.with_name("set.tar.gz.part")


def test_a_file_arrives_whole_and_progress_is_told(server, target):
    steps = []
    fetch([server.address], target, md5(server.content), lambda *step: steps.append(step))
    assert target.read_bytes() == server.content
    assert not part_of(target).exists()
    assert server.requests == [None]
    assert steps[-1] == ("set.tar.gz", 1_000_000, 1_000_000)
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)


def test_a_broken_connection_is_taken_up_where_it_broke(server, target):
    server.cut_after = [300_000, 200_000]
    fetch([server.address], target, md5(server.content))
    assert target.read_bytes() == server.content
    assert server.requests == [None, "bytes=300000-", "bytes=500000-"]


def test_many_breaks_are_survived_as_long_as_each_try_brings_something(server, target):
    server.cut_after = [90_000] * 10
    fetch([server.address], target, md5(server.content))
    assert target.read_bytes() == server.content
    assert len(server.requests) > 2 * TRIES


def test_a_later_call_goes_on_from_the_part_that_is_there(server, target):
    part_of(target).parent.mkdir()
    part_of(target).write_bytes(server.content[:600_000])
    steps = []
    fetch([server.address], target, md5(server.content), lambda *step: steps.append(step))
    assert target.read_bytes() == server.content
    assert server.requests == ["bytes=600000-"]
    assert steps[0][1] > 600_000
    assert steps[-1][1:] == (1_000_000, 1_000_000)


def test_a_server_that_ignores_ranges_starts_over(server, target):
    server.ranges = False
    server.cut_after = [300_000]
    fetch([server.address], target, md5(server.content))
    assert target.read_bytes() == server.content
    assert server.requests == [None, "bytes=300000-"]


def test_a_part_that_is_already_whole_is_kept(server, target):
    part_of(target).parent.mkdir()
    part_of(target).write_bytes(server.content)
    fetch([server.address], target, md5(server.content))
    assert target.read_bytes() == server.content
    assert server.requests == ["bytes=1000000-"]


@pytest.mark.parametrize("left_over", [b"another version" * 100, bytes(2_000_000)], ids=["shorter", "longer"])
def test_a_part_of_another_file_is_thrown_away(server, target, left_over):
    part_of(target).parent.mkdir()
    part_of(target).write_bytes(left_over)
    fetch([server.address], target, md5(server.content))
    assert target.read_bytes() == server.content


def test_a_server_that_says_no_length_still_serves(server, target):
    server.lengths = False
    steps = []
    fetch([server.address], target, md5(server.content), lambda *step: steps.append(step))
    assert target.read_bytes() == server.content
    assert steps[-1] == ("set.tar.gz", 1_000_000, None)


def test_a_wrong_checksum_names_both_sums_and_leaves_nothing(server, target):
    wanted = md5(b"something else")
    with pytest.raises(DataError) as caught:
        fetch([server.address], target, wanted)
    message = str(caught.value)
    assert md5(server.content) in message
    assert wanted in message
    assert "removed" in message
    assert list(target.parent.iterdir()) == []


def test_the_next_address_is_tried_when_one_fails(server, target):
    server.failures = [404]
    fetch([server.address + "?gone", server.address], target, md5(server.content))
    assert target.read_bytes() == server.content
    assert len(server.requests) == 2


def test_a_busy_server_is_asked_again(server, target):
    server.failures = [503, 429]
    fetch([server.address], target, md5(server.content))
    assert target.read_bytes() == server.content


def test_a_page_that_is_not_there_is_asked_for_once(server, target):
    server.failures = [404] * 9
    with pytest.raises(DataError, match="HTTP 404"):
        fetch([server.address], target, md5(server.content))
    assert len(server.requests) == 1


def test_a_server_that_never_delivers_is_given_up_and_the_part_kept(server, target):
    server.cut_after = [1000] + [0] * 20
    with pytest.raises(DataError, match=r"broke after 1,000 of 1,000,000 bytes"):
        fetch([server.address], target, md5(server.content))
    assert len(server.requests) == 1 + TRIES - 1
    assert part_of(target).read_bytes() == server.content[:1000]


def test_without_a_network_the_error_says_where_to_put_the_file(target, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = f"http://127.0.0.1:{port}/set.tar.gz"
    with pytest.raises(DataError) as caught:
        fetch([address], target, "0" * 32)
    assert address in str(caught.value)
    assert f"put it at {target}" in str(caught.value)


def test_a_name_that_cannot_be_looked_up_is_reported_at_once(target, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)

    def no_network(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DataError, match="Name or service not known"):
        fetch(["http://data.example/set.tar.gz"], target, "0" * 32)
    assert waits == []


def test_the_wait_between_tries_doubles(server, target, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    server.failures = [503] * 9
    with pytest.raises(DataError, match="HTTP 503"):
        fetch([server.address], target, "0" * 32, pause=0.5)
    assert waits == [0.5, 1.0, 2.0]


def test_a_folder_that_cannot_be_made_is_named(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write it"):
        fetch([server.address], tmp_path / "file" / "set.tar.gz", "0" * 32)

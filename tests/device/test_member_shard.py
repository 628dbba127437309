"""A device whose shard is cut short, replaced or gone says so once, stays, and goes on when it is put right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from foreseed.device.member import Member
from foreseed.device.worker import Worker
from foreseed.wire import Ready, Reply, encode
from tests.device.scripted import ask, join, kinds, play, serve, small_program, without_costs, write_shard


def member_of(shard: Path, said: list[str], **server: Any) -> tuple[Any, Member]:
    here, member = serve(**server), Member(shard, say=said.append)
    join(here, member)
    play(here, member)
    return here, member


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda path: os.truncate(path, 100), "100 bytes are no whole number of records of 33 bytes"),
        (lambda path: os.truncate(path, 0), "the shard is empty"),
        (lambda path: path.unlink(), "cannot read the shard (No such file or directory)"),
        (lambda path: path.write_bytes(bytes([9]) * 66), "sample 0 has label 9"),
    ],
)
def test_a_shard_harmed_between_rounds_is_one_line_until_it_is_put_right(
    harm: Any, complaint: str, shard: Path
) -> None:
    said: list[str] = []
    server, member = member_of(shard, said)
    good = shard.read_bytes()
    harm(shard)
    order = server.order()
    assert member.receive(encode(order)) == []
    for _ in range(3):
        assert member.work() == []
    assert len(said) == 1
    assert said[0].startswith(f"round 2: no answer: {shard}: ")
    assert complaint in said[0]
    assert said[0].endswith("; waiting for the shard")
    assert member.refused == {"bad shard": 1}
    assert member.rejection is None
    (shard.parent / "new").write_bytes(good)
    (shard.parent / "new").replace(shard)
    (reply,) = member.work()
    untouched = Member(shard)
    join(server, untouched)
    assert without_costs(reply) == without_costs(ask(server, untouched, order)[-1])


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_shard_cut_short_while_the_device_answers_gives_no_answer(
    shard: Path, batch_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    program = small_program(norm_groups=0) if batch_norm else small_program()
    server, member = member_of(shard, said, program=program, batch=8 * batch_norm)
    answer = Worker.answer

    def cut(worker: Worker, *arguments: Any) -> Reply:
        os.truncate(shard, 50)
        return answer(worker, *arguments)

    monkeypatch.setattr(Worker, "answer", cut)
    member.receive(encode(server.order()))
    assert member.work() == []
    assert said == []
    assert member.work() == []
    assert len(said) == 1
    assert "50 bytes are no whole number of records" in said[0]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_shard_of_another_size_is_told_to_the_server_and_answered_with(shard: Path, batch_norm: bool) -> None:
    said: list[str] = []
    program = small_program(norm_groups=0) if batch_norm else small_program()
    server, member = member_of(shard, said, program=program, batch=8 * batch_norm)
    write_shard(shard, count=5, seed=2)
    order = server.order()
    assert member.receive(encode(order)) == []
    (ready,) = member.work()
    assert isinstance(ready, Ready)
    assert ready.samples == 5
    assert said == [f"{shard}: the shard has 5 images now, it had 12"]
    said_to_order = ask(server, member, order)
    assert kinds(said_to_order) == [Reply]
    assert said_to_order[-1].samples == 5
    fresh = Member(shard)
    join(server, fresh)
    assert without_costs(ask(server, fresh, order)[-1]) == without_costs(said_to_order[-1])


def test_a_shard_written_again_with_as_many_images_is_simply_used(shard: Path) -> None:
    said: list[str] = []
    server, member = member_of(shard, said)
    write_shard(shard.parent / "new", seed=5).replace(shard)
    order = server.order()
    (reply,) = ask(server, member, order)
    fresh = Member(shard)
    join(server, fresh)
    assert without_costs(reply) == without_costs(ask(server, fresh, order)[-1])
    assert said == []

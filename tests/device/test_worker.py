"""Memory budgets: used to the byte, never exceeded, and the answers stay the same bits."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from foreseed.device.member import Member
from foreseed.device.worker import working_bytes
from foreseed.engine.blocks import Block
from foreseed.engine.native import NativeEngine
from foreseed.engine.program import Program
from foreseed.wire import Fetch, Reply, encode
from tests.device.scripted import (
    LARGE,
    Server,
    ask,
    join,
    kinds,
    needed_bytes,
    play,
    play_without,
    serve,
    small_program,
    without_costs,
)


def too_small(server: Server, shard: Path, budget: int) -> int:
    """The budget that a member asks for instead."""
    return needed_bytes(server, Member(shard, memory_budget=budget), budget)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_budget_is_used_to_the_byte(shard: Path, batch_norm: bool) -> None:
    program = small_program(norm_groups=0) if batch_norm else small_program()
    server = serve(program, batch=8 * batch_norm)
    least = too_small(server, shard, 2 * len(program.bytes))
    assert too_small(server, shard, least - 1) == least
    member = Member(shard, memory_budget=least)
    join(server, member)
    assert member.worker is not None
    beside = working_bytes(program.n_live, server.coordinator.vectors)
    assert member.worker.engine.planned_bytes + beside == least
    assert (member.worker.engine.by_row, member.worker.engine.batch) == ((False, 8) if batch_norm else (True, 1))
    roomy = Member(shard)
    join(server, roomy)
    order = server.order()
    assert without_costs(ask(server, member, order)[-1]) == without_costs(ask(server, roomy, order)[-1])


def test_a_program_that_is_too_long_is_not_even_fetched(shard: Path) -> None:
    member = Member(shard, memory_budget=100_000)
    assert member.receive(encode(serve().welcome()._replace(program_bytes=50_001))) == []
    assert member.rejection is not None
    assert "needs at least 100002 bytes here, the budget is 100000;" in member.rejection


def test_local_steps_need_room_for_one_more_vector(shard: Path) -> None:
    said: list[str] = []
    server = serve(local_steps=3)
    least = too_small(server, shard, 2 * len(server.program))
    member = Member(shard, memory_budget=least, say=said.append)
    join(server, member)
    assert ask(server, member, server.order()) == []
    assert member.refused == {"impossible order": 1}
    more = least + 4 * small_program().n_live
    assert said == [
        f"round 1: refused: the run needs at least {more} bytes here, the budget is {least}; "
        "raise --memory-budget, or prune further"
    ]
    # An order without them is another matter.
    assert kinds(ask(server, member, server.order()._replace(local_steps=1))) == [Fetch, Reply]
    member = Member(shard, memory_budget=more)
    join(server, member)
    assert kinds(ask(server, member, server.order())) == [Fetch, Reply]


def test_an_engine_gives_way_to_local_steps(shard: Path) -> None:
    server = serve(local_steps=3)
    least = too_small(server, shard, 2 * len(server.program))
    room = working_bytes(small_program().n_live, server.coordinator.vectors, local_steps=True)
    batches = set()
    for budget in range(least + 4 * small_program().n_live, least + 20_000, 500):
        member = Member(shard, memory_budget=budget)
        join(server, member)
        assert member.worker is not None
        before = member.worker.engine.planned_bytes
        assert before + working_bytes(small_program().n_live, server.coordinator.vectors) <= budget
        assert isinstance(ask(server, member, server.order())[-1], Reply)
        after = member.worker.engine.planned_bytes
        assert after <= before
        assert after + room <= budget
        batches.add(member.worker.engine.batch)
    assert len(batches) > 3


def blocks_from(starts: list[int], program: Program) -> tuple[Block, ...]:
    """Two directions for each block; they begin at 0 and there."""
    return tuple(Block(end - at, 2, 1) for at, end in pairwise([0, *starts, program.n_live]))


def test_a_budget_for_whole_passes_alone_answers_about_blocks_all_the_same(shard: Path) -> None:
    program = small_program()
    # From the norm on: it cannot work in place on what is kept for it.
    start = program.layers()[0].n_values
    server = serve(program, blocks=blocks_from([start], program))
    least = too_small(server, shard, 2 * len(program.bytes))
    beside = working_bytes(program.n_live, server.coordinator.vectors)
    enough = NativeEngine(program, batch=1, by_row=True, lanes=1, keep=[start]).planned_bytes + beside
    assert least < enough
    order, answers = server.order(), set()
    for budget, keep in ((least, ()), (enough - 1, ()), (enough, (start,)), (None, (start,))):
        member = Member(shard, memory_budget=budget)
        join(server, member)
        answers.add(without_costs(ask(server, member, order)[-1]))
        assert member.worker is not None
        assert member.worker.engine.keep == keep
        assert budget is None or member.worker.engine.planned_bytes + beside <= budget
    assert len(answers) == 1


def test_an_engine_keeps_what_the_order_at_hand_needs(shard: Path) -> None:
    program = small_program()
    conv, norm = (layer.n_values for layer in program.layers()[:2])
    server, member = serve(program), Member(shard)
    join(server, member)
    for starts in ([conv], [conv, conv + norm], [], [conv + norm]):
        blocks = blocks_from(starts, program) if starts else ()
        order = server.order()._replace(k=2 * max(len(blocks), 1), blocks=blocks)
        other = Member(shard)
        join(server, other)
        assert without_costs(ask(server, member, order)[-1]) == without_costs(ask(server, other, order)[-1])
        assert member.worker is not None
        assert member.worker.engine.keep == tuple(starts)


def peak_of_an_answer(shard: Path, bits: int) -> int:
    server, member = serve(k=20_000, bits=bits), Member(shard)
    join(server, member)
    order = server.order()
    ask(server, member, order._replace(k=2))  # so that the values are there
    member.receive(encode(order))
    tracemalloc.start()
    try:
        assert kinds(member.work()) == [Reply]
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_packing_takes_no_memory_of_its_own(shard: Path) -> None:
    whole = peak_of_an_answer(shard, 32)
    for bits in (1, 8):
        assert peak_of_an_answer(shard, bits) < whole + 2_000


@pytest.mark.parametrize("local_steps", [1, 3])
def test_catching_up_and_answering_allocate_no_more_than_was_counted(shard: Path, local_steps: int) -> None:
    server, member = serve(LARGE, local_steps=local_steps, k=3), Member(shard)
    join(server, member)
    play(server, member)
    play_without(server, 2)
    member.receive(encode(server.order()))
    tracemalloc.start()
    try:
        assert kinds(member.work()) == [Reply]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert member.worker is not None
    # Beside the vectors, which were there before; what is left are the order's few numbers and Python's own objects.
    vectors = server.coordinator.vectors
    counted = working_bytes(LARGE.n_live, vectors, local_steps > 1) - 4 * LARGE.n_live * vectors
    # An array that is made of bytes has a sixteenth more room than it needs.
    assert counted - 4 * LARGE.n_live < peak < counted * 17 / 16 + 30_000
    assert 4 * LARGE.n_live > 200_000


def test_batch_norm_without_a_batch_is_refused(shard: Path) -> None:
    member = Member(shard)
    join(serve(small_program(norm_groups=0)), member)
    assert member.rejection is not None
    assert "BatchNorm, the server gives no batch size" in member.rejection

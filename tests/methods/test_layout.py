"""Blocks of layers: what each gets of directions and passes."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreseed.engine import Engine, Program
from foreseed.engine.blocks import Block, spans, starts
from foreseed.engine.walker import reads
from foreseed.meter import bp_free_work
from foreseed.methods.layout import layer_groups, layout
from foreseed.models import build, compile

MODELS = {"lenet5": (3, 32, 32), "resnet20": (3, 16, 16)}


@cache
def program(name: str) -> Program:
    return compile(build(name, MODELS[name], 10))[0]


@given(
    name=st.sampled_from(sorted(MODELS)),
    most=st.integers(1, 30),
    k=st.integers(1, 5000),
    passes=st.integers(2, 80),
)
def test_blocks_cover_all_values_and_keep_to_the_budgets(name: str, most: int, k: int, passes: int) -> None:
    spread = max(1, -(-k // (passes - 1)))
    blocks = layout(program(name), most, k, spread)
    assert len(blocks) <= most
    assert len(blocks) != 1
    if not blocks:
        return
    assert sum(block.values for block in blocks) == program(name).n_live
    assert sum(block.k for block in blocks) == k
    for block in blocks:
        assert block.spread & (block.spread - 1) == 0  # parts of one are made of whole parts of another
        assert 1 <= block.spread <= block.k
    images = 1 << 12
    work = bp_free_work(program(name), images, blocks)
    assert work.forward_passes <= (k / spread + 1) * images


def test_blocks_begin_where_layers_do() -> None:
    net = program("resnet20")
    blocks = layout(net, 6, 2000, 40)
    assert len(blocks) == 6
    starts = {net.first_op(span.at) for span in spans(blocks)}
    assert starts <= {place.number for place in net.places if place.op.n_weights}
    ends = [sum(layer.n_values for layer in net.layers()[:number]) for number in starts]
    assert {span.at for span in spans(blocks)} == set(ends)


def test_what_blocks_keep_takes_no_more_than_the_tensors_that_are_read_across_their_starts() -> None:
    net = program("resnet20")
    layers = [at for at, layer in zip(first_values(net), net.layers(), strict=True) if layer.n_values]
    kept = starts(spans(layout(net, 5, 2000, 40)))
    assert len(kept) == 4
    whole, blocks, everything = (Engine(net, batch=1, keep=keep).planned_bytes for keep in ((), kept, layers))
    crossing = {
        tensor
        for start in map(net.first_op, kept)
        for place in net.places[start:]
        for tensor in reads(place.op)
        if tensor <= start
    }
    # Two at most: what a layer reads, and what is added to what it makes. A 3x3 convolution reads a border too.
    assert len(crossing) <= 2 * len(kept)
    shapes = net.shapes()
    room = sum(
        4 * channels * (height + 2) * (width + 2) for channels, height, width in map(shapes.__getitem__, crossing)
    )
    assert blocks - whole <= room
    assert everything - whole > 4 * room


def first_values(net: Program) -> list[int]:
    """Where the values of each layer begin."""
    return [0, *accumulate(layer.n_values for layer in net.layers())][:-1]


def test_the_last_layers_have_more_passes_for_their_cost_and_the_first_fewer_values_a_direction() -> None:
    blocks = layout(program("lenet5"), 8, 6400, 128)
    assert len(blocks) == 5
    passes = [block.k / block.spread for block in blocks]
    assert passes[0] < passes[1] < passes[2]
    assert blocks[0].values / blocks[0].k < blocks[2].values / blocks[2].k


def test_few_passes_are_not_spent_on_base_losses() -> None:
    assert len(layout(program("lenet5"), 8, 1600, 320)) == 2
    assert layout(program("lenet5"), 8, 1600, 1600) == ()


@pytest.mark.parametrize("most", [1, 8])
def test_one_block_is_none(most: int) -> None:
    # One block was asked for, or there are too few directions to share out.
    assert layout(program("lenet5"), most, 50 if most == 1 else 3, 1) == ()


def test_groups_are_layers_with_what_it_costs_to_start_there() -> None:
    groups = layer_groups(program("lenet5"))
    assert [group.values for group in groups] == [456, 2416, 48120, 10164, 850]
    macs = [352_800, 240_000, 48_000, 10_080, 840]
    whole = 651_720 + 62_006
    costs = [max(sum(macs[i:]) / 651_720, (sum(macs[i:]) + group.values) / whole) for i, group in enumerate(groups)]
    assert [group.cost for group in groups] == pytest.approx(costs)
    # Of 784, 100 and 1 positions, the fourth root.
    assert [group.slope for group in groups] == pytest.approx([784**0.25, 100**0.25, 1, 1, 1])


def test_passes_of_a_block_cost_what_lies_behind_its_first_layer() -> None:
    net, blocks = program("lenet5"), (Block(456, 2, 1), Block(2416 + 48120 + 10164 + 850, 3, 1))
    work = bp_free_work(net, 10, blocks)
    first, rest = 352_800, 240_000 + 48_000 + 10_080 + 840
    # A base pass for each; two directions through all layers, three through those behind the first.
    assert work.flops == 2 * 10 * (2 * (first + rest) + 2 * (first + rest) + 3 * rest)
    assert work.forward_passes == -(-work.flops // (2 * (first + rest)))

"""Blocks of layers: how many directions each gets, and on how many images they are probed.

The estimate of a block of n values by K directions, whose passes go over P times the device's images, is off by about

    n s^2 / P + n g^2 / K                (squared; docs/theory.md)

with s^2 the squared slopes of single images and g^2 those of the device's mean, both over the block's own values alone:
what other blocks' slopes would add to it is not there. A pass of a block costs what its first layer and all behind it
cost, since what comes before need not be computed again. So for given passes and directions the sum over blocks is
least with P ~ sqrt(n s^2 / cost) and K ~ sqrt(n g^2). Slopes are not known before training; by measurement they are
larger where a weight is used at more positions, about as the fourth root of their number.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, sqrt
from typing import NamedTuple

from foreseed.engine import Program
from foreseed.engine.blocks import Block
from foreseed.engine.ops import Kind

_BASE_SHARE = 3
"""At most one of so many passes is for base losses, of which each block needs its own."""


class Group(NamedTuple):
    """Layers that follow each other."""

    values: int
    cost: float
    """Of a pass from the first of them on, in whole passes; where that is more, perturbing counts too."""
    slope: float
    """Squared, of their values together; in proportion to other groups."""

    @property
    def weight(self) -> float:
        """Its share of directions, and, over the root of its cost, of passes."""
        return sqrt(self.values * self.slope)

    @property
    def harm(self) -> float:
        """What its passes contribute to the root of the error that they leave."""
        return self.weight * sqrt(self.cost)


def layout(program: Program, most: int, k: int, spread: int) -> tuple[Block, ...]:
    """At most so many blocks, for k directions in all and the forward passes that they take at this spread.

    None where there would be one only: then all directions perturb all values.
    """
    passes = k / spread + 1
    groups = _merged(layer_groups(program), max(1, min(most, int(passes) // _BASE_SHARE)))
    if len(groups) == 1 or k < 2 * len(groups):
        return ()
    directions = _shared_out([group.weight for group in groups], k)
    parts = _parts(groups, directions, passes - len(groups))
    return tuple(map(Block, (group.values for group in groups), directions, parts))


def layer_groups(program: Program) -> list[Group]:
    """A group for each convolution and linear layer, with the norms behind it."""
    layers, groups = program.layers(), list[Group]()
    whole = program.macs + program.n_live
    for number, layer in enumerate(layers):
        if layer.kind is Kind.CONV and layer.n_values:
            behind = sum(after.macs for after in layers[number:])
            cost = max(behind / program.macs, (behind + layer.n_values) / whole)
            positions = layer.macs / max(layer.n_weights, 1)
            groups.append(Group(layer.n_values, cost, sqrt(sqrt(positions))))
        elif layer.n_values and groups:
            groups[-1] = groups[-1]._replace(values=groups[-1].values + layer.n_values)
        elif layer.n_values:  # a norm before any of them: with the first
            groups.append(Group(layer.n_values, 1.0, 0.0))
    if len(groups) > 1 and not groups[0].slope:
        groups[:2] = [_together(groups[0], groups[1])]
    return groups


def _merged(groups: list[Group], most: int) -> list[Group]:
    """At most so many: neighbours are put together where that costs least."""
    while len(groups) > most:
        pairs = [_together(a, b) for a, b in pairwise(groups)]
        loss = [pair.harm - groups[i].harm - groups[i + 1].harm for i, pair in enumerate(pairs)]
        at = loss.index(min(loss))
        groups = [*groups[:at], pairs[at], *groups[at + 2 :]]
    return groups


def _together(first: Group, second: Group) -> Group:
    return Group(first.values + second.values, first.cost, first.slope + second.slope)


def _shared_out(weights: list[float], total: int) -> list[int]:
    """So many in proportion to the weights, at least one each."""
    left, rest, counts = total, sum(weights), []
    for i, weight in enumerate(weights):
        count = min(max(1, round(left * weight / rest)), left - (len(weights) - 1 - i))
        counts.append(count)
        left, rest = left - count, rest - weight
    return [*counts[:-1], counts[-1] + left]


def _parts(groups: list[Group], directions: list[int], passes: float) -> list[int]:
    """Powers of 2, so that the parts of one block are made of whole parts of another."""
    unit = passes / sum(group.harm for group in groups)
    wanted = [unit * group.weight / sqrt(group.cost) for group in groups]
    parts = [_power_of_2(k, k / p) for k, p in zip(directions, wanted, strict=True)]

    def cost() -> float:
        return sum(k / s * group.cost for k, s, group in zip(directions, parts, groups, strict=True))

    # What rounding has left over goes where it takes off most.
    def gain(i: int) -> float:
        return groups[i].weight ** 2 * parts[i] / directions[i]

    for i in sorted(range(len(groups)), key=gain, reverse=True) * 2:
        if parts[i] > 1:
            parts[i] //= 2
            if cost() > passes:
                parts[i] *= 2
    return parts


def _power_of_2(k: int, least: float) -> int:
    """The smallest one that is at least so much; at most the largest one up to k."""
    power = 1 << max(0, (ceil(least) - 1).bit_length())
    return min(power, 1 << (k.bit_length() - 1))

"""ZeroFL (Qiu et al., ZeroFL: Efficient On-Device Training for Federated Learning with Local Sparsity, ICLR 2022).

    Server:  for each round t: K random devices
                               for each device k: TrainLocally(k, w_t)
             top-k-weights:    w_{t+1} = sum over k of (n_k / n) w_k, what a device did not send being 0
             the other two:    w_{t+1} = w_t + sum over k of (n_k / n) d_k, likewise
    TrainLocally(k, w_t):  E epochs of SWAT (`foreseed.methods.swat`) at sparsity sp give w_E; d = w_E - w_t
             top-k-weights:    send the largest 1 - sp + r_mask of w_E
             diff-on-top-k:    send d of those weights
             top-k-of-diff:    send the largest 1 - sp + r_mask of d

Weights stay dense on devices and on the server: sparsity saves arithmetic and bytes up, no memory. The model is what
SWAT computes with: the largest 1 - sp of each layer's weights. The paper has it that the dense weights, which no
forward pass ever saw together, are worth nothing (82 % become 10 %), so the sparse model is what is tested and saved.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import numpy as np
from pydantic import Field

from foreseed.config import ConfigError, Method, Table, enter
from foreseed.meter import DeviceMemory, Work, bp_memory
from foreseed.methods import moving_mask
from foreseed.methods.averaging import moving_average
from foreseed.methods.fedavg import aggregate, begin, client_update
from foreseed.methods.layer_counts import share_out
from foreseed.methods.moving_mask import Layout, layers_kept
from foreseed.methods.protocol import Devices, Local, LocalResult, RoundResult, Traffic, Vector
from foreseed.methods.swat import SparseTraining
from foreseed.methods.task import Task

Uplink = Literal["top-k-weights", "diff-on-top-k", "top-k-of-diff"]


class Settings(Table):
    """The keys of [zerofl]."""

    uplink: Uplink = Field(
        default="top-k-weights",
        description="what devices send: the largest weights (others count as 0), their change, or the largest changes",
    )
    mask_ratio: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="share of weights sent beyond prune.density: more cost bytes, none cost the paper 6 to 10 points",
    )
    dense: Literal["none", "last", "both"] = Field(
        default="last",
        description="end layers left whole: the last, or the first too; the others pay, the density is as set",
    )


@dataclass
class State(moving_mask.State):
    """As that of any moving mask, but the weights that are not among the largest are kept, and trained too."""

    def take(self, layout: Layout, kept: Sequence[int], weights: Vector, ema: float) -> None:
        """Go on with other weights, and with the model that the largest of them make."""
        live = layers_kept(layout, np.abs(weights), kept)
        if not np.array_equal(live, self.live):
            self.program, self.live = layout.pruned(live), live
        self.weights, self.average = weights, moving_average(self.average, weights, ema)


def init(task: Task) -> State:
    """The drawn weights, all of them, and the model of the largest."""
    layout = Layout(task.program)
    live = layers_kept(layout, np.abs(task.values), kept_counts(task, layout))
    average = task.values.copy() if task.config.train.ema else None
    return State(layout.pruned(live), task.values.copy(), live, task.stats, average)


def kept_counts(task: Task, layout: Layout) -> list[int]:
    """How many weights of each layer SWAT computes with: the same share of all that are not left whole."""
    density, ends = task.config.prune.density, task.config.own(Settings).dense
    first, last = int(ends == "both"), len(layout.layers) - int(ends != "none")
    whole = [layer.size for layer in layout.layers[:first] + layout.layers[last:]]
    total = builtins.round(density * layout.n_weights) - sum(whole)
    between = layout.layers[first:last]
    if total < len(between):
        raise ConfigError(
            f"prune.density = {density:g} is used up by the layers that zerofl.dense = {ends} leaves whole; raise it, "
            'or set zerofl.dense = "none"'
        )
    counts = share_out(between, [1.0] * len(between), total)
    return [*whole[:first], *counts, *whole[first:]]


def round(task: Task, devices: Devices, state: State) -> RoundResult:
    """One round: sample, TrainLocally on each device, aggregate."""
    number, t, settings = state.done + 1, task.config.train, task.config.own(Settings)
    lr, chosen = begin(task.config, number)
    layout = Layout(task.program)
    kept = kept_counts(task, layout)
    sent = sent_counts(layout, kept, settings.mask_ratio)

    def train_locally(local: Local) -> LocalResult:
        with SparseTraining(local.trainer.model, {layer.name: n for layer, n in zip(layout.layers, kept, strict=True)}):
            trained = client_update(task.config, number, lr, local, state.weights, state.stats)
        values = upload(settings.uplink, layout, state.weights, trained.values, sent)
        return LocalResult(len(local.images), values, trained.stats, trained.loss)

    results = list(devices.visit(task.program, chosen, train_locally))
    nonzero = sum(int(np.count_nonzero(state.weights[layer.at])) for layer in layout.layers)
    mean = aggregate((result.samples, result.values) for result in results)
    state.take(layout, kept, mean if settings.uplink == "top-k-weights" else state.weights + mean, t.ema)
    state.stats = aggregate((result.samples, result.stats) for result in results)
    state.done = number
    samples = sum(result.samples for result in results)
    return RoundResult(
        round=number,
        lr=lr,
        train_loss=fsum(result.samples * result.loss for result in results) / samples,
        participants=chosen,
        samples=samples,
        # Forward and the input's gradient with the kept share of weights, the weights' gradient with the same share of
        # activations: each costs as much as the sparse model's forward pass. To find the largest takes comparisons.
        work=sum((layout.work(state.live, 3 * t.epochs * result.samples) for result in results), Work()),
        # Up what was chosen, down every weight that is not 0.
        traffic=Traffic(len(results) * wire_bytes(layout, sum(sent)), len(results) * wire_bytes(layout, nonzero)),
    )


def sent_counts(layout: Layout, kept: Sequence[int], mask_ratio: float) -> list[int]:
    """How many weights of each layer a device sends: those it computes with, and r_mask of all beyond."""
    return [
        min(layer.size, count + builtins.round(mask_ratio * layer.size))
        for layer, count in zip(layout.layers, kept, strict=True)
    ]


def upload(uplink: Uplink, layout: Layout, before: Vector, after: Vector, sent: Sequence[int]) -> Vector:
    """What a device sends, 0 in all other places. What is never pruned, biases and norms, is sent whole."""
    change = after - before
    chosen = layers_kept(layout, np.abs(change if uplink == "top-k-of-diff" else after), sent)
    return np.where(chosen, after if uplink == "top-k-weights" else change, np.float32(0))


def wire_bytes(layout: Layout, weights: int) -> int:
    """Some weights and a bit for each to tell which, or all of them if that is less; all that is never pruned."""
    others = layout.n - layout.n_weights + layout.program.n_stats
    return 4 * others + min(4 * layout.n_weights, 4 * weights + layout.mask_bytes)


def device_memory(task: Task, state: State) -> DeviceMemory:
    """Everything is dense; and bits tell the largest weights, and a change needs the weights it began with."""
    layout, train = Layout(task.program), task.config.train
    change = 0 if task.config.own(Settings).uplink == "top-k-weights" else 4 * layout.n
    what = "the bits of the largest weights" + (", the weights as they came" if change else "")
    return bp_memory(task.program, train.batch, train.momentum > 0, layout.mask_bytes + change, what)


enter(
    Method(
        "zerofl", "sparse arithmetic on dense weights, backpropagation", init, round, device_memory,
        backpropagates=True, settings=Settings,
    )
)  # fmt: skip

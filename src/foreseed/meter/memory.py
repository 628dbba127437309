"""What backpropagation must hold in memory, computed from the program. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from foreseed.engine.program import Act, Kind, Op, Pool, Program, unknown

_FLOAT, _INT64 = 4, 8
_WHERE = "the count of what backpropagation saves"


@dataclass(frozen=True)
class BpMemory:
    """The bytes that a training step by backpropagation holds.

    Everything is dense: torch trains a pruned model as masked dense tensors, so pruning saves none of this. What comes
    and goes within a layer (a gradient of an activation, a kernel's scratch) is not counted: this is a lower bound.
    """

    parameters: int
    """Weights, biases and norm parameters, and the running statistics of batch norms."""
    gradients: int
    """One number for each parameter."""
    optimiser: int
    """Momentum: one number for each parameter."""
    activations: int
    """What autograd saves of a batch for the backward pass (`saved_bytes`)."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.activations


def planned_bp_bytes(program: Program, batch: int, momentum: bool) -> BpMemory:
    """The memory of training this program's dense model by backpropagation with minibatches of `batch` images."""
    n = sum(layer.n_values - layer.n_weights + layer.n_dense for layer in program.layers())
    return BpMemory(
        parameters=_FLOAT * (n + program.n_stats),
        gradients=_FLOAT * n,
        optimiser=_FLOAT * n if momentum else 0,
        activations=saved_bytes(program, batch),
    )


def saved_bytes(program: Program, batch: int) -> int:
    """The bytes that torch's autograd saves in the forward pass of a batch; a tensor saved twice counts once.

    - Convs, linear layers and norms save what they read; batch norm adds two numbers a channel, group norm two a group
      and image (mean and inverse deviation).
    - ReLU saves what it makes, Hardswish what it reads. (A ReLU after a max pool counts as before it: the program says
      no more.)
    - Max pooling saves what it reads, and a 64-bit index for each number that it makes; average pooling what it reads,
      but nothing if its window is the whole map, for it is a mean then.
    - Additions save nothing; nor does anything else before the first layer with parameters.
    - The loss saves the log-probabilities, the labels (64 bits each) and its total weight (one number).
    """
    tape = _Tape(program.image_bytes)  # a byte for each number
    tensors = [0]
    for op, layer in zip(program.ops, program.layers(), strict=True):
        x = tensors[op.a]
        if op.kind is Kind.CONV:
            x = tape.conv(x, op.channels * (layer.dense_macs // layer.n_dense))
        elif op.kind is Kind.NORM:
            x = tape.norm(x, op, layer.shape[0])
        elif op.kind is Kind.ADD:
            x = tape.make(tape.sizes[x], bool({x, tensors[op.b]} & tape.trained))
        elif op.kind not in (Kind.POOL, Kind.ACT):
            raise unknown("op kind", op.kind, _WHERE)
        if op.act:
            x = tape.act(x, op.act)
        if op.pool:
            x = tape.pool(x, op, layer.shape)
        tensors.append(x)
    loss: int = _FLOAT * (batch * program.classes + 1) + _INT64 * batch
    return batch * tape.image_bytes() + tape.batch_bytes + loss


class _Tape:
    """The tensors of a forward pass one by one, with those between the parts of an op, and which of them are saved."""

    def __init__(self, n_input: int) -> None:
        self.sizes = [n_input]
        """Numbers in each tensor, for one image."""
        self.trained: set[int] = set()
        """The tensors that depend on parameters: only from these on do ops without parameters save anything."""
        self.saved: set[int] = set()
        self.extra_bytes = 0
        self.batch_bytes = 0

    def image_bytes(self) -> int:
        """Bytes saved for each image."""
        return _FLOAT * sum(self.sizes[x] for x in self.saved) + self.extra_bytes

    def make(self, size: int, trained: bool) -> int:
        x = len(self.sizes)
        self.sizes.append(size)
        if trained:
            self.trained.add(x)
        return x

    def conv(self, x: int, size: int) -> int:
        self.saved.add(x)
        return self.make(size, True)

    def norm(self, x: int, op: Op, channels: int) -> int:
        trained = op.has_parameters or x in self.trained
        if trained:
            self.saved.add(x)
            self.extra_bytes += 2 * _FLOAT * op.groups
            self.batch_bytes += 0 if op.groups else 2 * _FLOAT * channels
        return self.make(self.sizes[x], trained)

    def act(self, x: int, act: Act) -> int:
        if act not in (Act.RELU, Act.HARDSWISH):
            raise unknown("activation", act, _WHERE)
        trained = x in self.trained
        y = self.make(self.sizes[x], trained)
        if trained:
            self.saved.add(y if act is Act.RELU else x)
        return y

    def pool(self, x: int, op: Op, shape: tuple[int, int, int]) -> int:
        if op.pool not in (Pool.MAX, Pool.AVERAGE, Pool.AVERAGE_INSIDE):
            raise unknown("pool", op.pool, _WHERE)
        trained = x in self.trained
        whole_map = op.pool_window[0] * op.pool_window[1] * shape[0] == self.sizes[x]
        if trained and (op.pool is Pool.MAX or not whole_map):
            self.saved.add(x)
        if trained and op.pool is Pool.MAX:
            self.extra_bytes += _INT64 * prod(shape)
        return self.make(prod(shape), trained)

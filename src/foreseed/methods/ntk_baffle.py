"""NTK-BAFFLE: foresight pruning, then training by forward passes alone (the paper's Algorithm 1).

The first half of the algorithm, NTK foresight pruning, is `foreseed.prune.foresight` (lines 1-17: T_p times, score
every surviving weight by the saliency of Eq. 14-15 and keep the best d^(t/T_p) of all); it has run when the world was
made, and `world.values` are W0 * m. This file is the second half, BP-free training; the numbers are its lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np
import numpy.typing as npt

from foreseed.config import fingerprint
from foreseed.meter import dense_forward_flops, forward_flops
from foreseed.server import Closed, Coordinator, Optimiser, Rules
from foreseed.server.coordinator import State as ServerState
from foreseed.wire import Update, decode, encode

if TYPE_CHECKING:
    from foreseed.config import Config
    from foreseed.simulate.fleet import Fleet
    from foreseed.simulate.world import World


@dataclass
class State:
    """What goes from round to round."""

    coordinator: Coordinator
    ema: npt.NDArray[np.float32] | None
    """The moving average of the values, for evaluation only."""

    @property
    def values(self) -> npt.NDArray[np.float32]:
        return self.coordinator.state.values

    @property
    def stats(self) -> npt.NDArray[np.float32]:
        return self.coordinator.state.stats


def init(world: World) -> State:
    """Line 1: W <- W0 * m."""
    config = world.config
    coordinator = Coordinator.start(_rules(config), _optimiser(config), world.values, world.stats)
    return State(coordinator, world.values.copy() if config.train.ema else None)


def round(world: World, fleet: Fleet, state: State) -> dict[str, Any]:
    """Lines 2-12: one round of training; returns what it cost."""
    coordinator = state.coordinator
    # Lines 3-4: C_t <- RandomSample(C, G_t). Every order tells its device how to come to hold W (line 6).
    # Lines 5-9: device i measures ΔL(W_i; D_i) along K directions of its seed, and sends these K numbers.
    traffic = fleet.hold_round(coordinator)
    # Lines 10-12: the server makes the same directions, aggregates by Eq. 16, and steps.
    closed = coordinator.close(fleet.map)
    if state.ema is not None:
        decay = np.float32(world.config.train.ema)
        state.ema = decay * state.ema + (1 - decay) * state.values
    return _row(world, closed) | traffic


def arrays(state: State) -> dict[str, npt.ArrayLike]:
    """The state as named arrays, for a checkpoint."""
    s = state.coordinator.state
    saved: dict[str, npt.ArrayLike] = {
        "round": s.round, "values": s.values, "stats": s.stats, "last_seen": s.last_seen, "log_bytes": s.log_bytes,
        "log": np.frombuffer(cbor2.dumps([encode(update) for update in state.coordinator.log]), np.uint8),
    }  # fmt: skip
    saved.update({f"buffer{i}": buffer for i, buffer in enumerate(s.buffers)})
    if state.ema is not None:
        saved["ema"] = state.ema
    return saved


def restore(world: World, saved: dict[str, Any]) -> State:
    """The state of a checkpoint."""
    state = init(world)
    buffers = [saved[f"buffer{i}"] for i in range(len(state.coordinator.state.buffers))]
    state.coordinator.state = ServerState(
        int(saved["round"]), saved["values"], buffers, saved["stats"], saved["last_seen"], saved["log_bytes"]
    )
    log = (decode(update, Update, limit=saved["log"].size) for update in cbor2.loads(saved["log"].tobytes()))
    state.coordinator.log = [update for update in log if isinstance(update, Update)]
    return State(state.coordinator, saved.get("ema"))


def run_id(config: Config) -> bytes:
    """The run's name in messages: from the config, so that a resumed run is the same run."""
    return bytes.fromhex(fingerprint(config))[:8]


def _rules(config: Config) -> Rules:
    t = config.train
    return Rules(
        run_id(config), config.seed, config.data.devices, config.data.per_round, t.k, t.sigma, t.direction, t.seeds,
        t.spread, t.difference == "central", t.local_steps, t.local_lr, t.clip, t.robust, t.trim,
        config.fleet.replay_numbers,
    )  # fmt: skip


def _optimiser(config: Config) -> Optimiser:
    t = config.train
    return Optimiser(t.optimiser, t.lr, t.momentum, t.weight_decay, t.lr_decay)


def _row(world: World, closed: Closed) -> dict[str, Any]:
    passes = sum(reply.forward_passes for reply in closed.replies)
    return {
        "round": closed.update.round,
        "lr": closed.lr,
        "train_loss": closed.base_loss,
        "devices": len(closed.replies),
        "samples": closed.samples,
        "forward_passes": passes,
        "flops": passes * forward_flops(world.program),
        "dense_flops": passes * dense_forward_flops(world.program),
        "participants": [reply.device for reply in closed.replies],
    }

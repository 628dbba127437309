"""A conductor on a stage: a clock that tests move, and devices that they speak for."""

from __future__ import annotations

from array import array
from collections import Counter
from hashlib import blake2b
from typing import Any

import numpy as np

from foreseed.config.schema import Fleet
from foreseed.coordinator import Coordinator, Optimiser, Rules
from foreseed.engine import quantise
from foreseed.fleet.conductor import Conductor, Send
from foreseed.methods.ntk_baffle import learn
from foreseed.wire import ANY_NUMBER, RUN_TAG, Join, Message, OrderMessage, Presence, Ready, Reply, encode

RUN = b"run-name"
PROGRAM_BYTES = bytes(range(256)) * 150
N, K, SAMPLES = 90, 2, 20


def instance_of(name: str, life: int = 0) -> str:
    """What a process of a device calls itself."""
    return blake2b(f"{name}/{life}".encode(), digest_size=4).hexdigest()


def answer_to(order: OrderMessage) -> Reply:
    """What a device measures: the same whenever it is asked."""
    rng = np.random.default_rng([order.round, order.device])
    found, differences = rng.uniform(1, 3), array("f", order.sigma * rng.normal(size=order.k))
    if order.bits == 32:
        losses = array("f", [found, *differences]).tobytes()
    else:
        scale, codes = quantise(differences, order.bits, order.seed, order.round, order.device)
        losses = array("f", [found, scale]).tobytes() + codes
    return Reply(order.run[:RUN_TAG], order.round, order.device, SAMPLES, losses, b"", 5, 20_000, 7, 8)


def coordinator_for(devices: int, per_round: int, seed: int = 3, bits: int = 32) -> Coordinator:
    rules = Rules(RUN, seed, devices, per_round, K, sigma=1e-3, robust="clip", max_share=0.5, bits=bits)
    return Coordinator.start(rules, Optimiser(lr=0.1), np.random.default_rng(seed).normal(size=N))


class Stage:
    """A conductor before its first round; numbers are stored as its owner would."""

    def __init__(
        self,
        devices: int = 6,
        per_round: int = 3,
        numbers: dict[str, int] | None = None,
        closed: bool = False,
        bits: int = 32,
        **fleet: Any,
    ) -> None:
        self.now = 100.0
        self.stored: list[dict[str, int]] = []
        self.said: list[str] = []
        self.coordinator = coordinator_for(devices, per_round, bits=bits)
        rules = Fleet.model_validate({"sample": "present", "deadline": 60.0, "gather": 10.0} | fleet)
        self.conductor = Conductor(
            self.coordinator, rules, PROGRAM_BYTES, 0, b"an-epoch", numbers or {}, self.stored.append, closed=closed,
            say=self.said.append,
        )  # fmt: skip

    def say(self, name: str, message: Message, life: int = 0) -> list[Send]:
        """A device's process publishes a message."""
        return self._checked(self.conductor.receive(name, instance_of(name, life), encode(message), self.now))

    def join(self, name: str, wanted: int = ANY_NUMBER, life: int = 0, held: int = 0) -> list[Send]:
        """A device joins and is ready."""
        return self.say(name, Join(wanted), life) + self.say(name, Ready(RUN, held, SAMPLES), life)

    def leave(self, name: str, life: int = 0) -> list[Send]:
        """The broker tells that a device's process has gone."""
        presence = Presence(bytes.fromhex(instance_of(name, life)), False)
        return self._checked(self.conductor.presence(name, encode(presence), self.now))

    def wait(self, seconds: float = 0.0) -> list[Send]:
        self.now += seconds
        return self._checked(self.conductor.tick(self.now))

    def open(self) -> list[Send]:
        self.conductor.open(self.now)
        return self.wait()

    def answer(self, send: Send, **changes: Any) -> list[Send]:
        """The device that an order went to replies, to the letter or not."""
        assert isinstance(send.message, OrderMessage)
        reply = answer_to(send.message)._replace(**changes)
        return self._checked(self.conductor.receive(send.name, send.instance, encode(reply), self.now))

    def _checked(self, sends: list[Send]) -> list[Send]:
        """What was sent; the counts that a round goes by are those of its devices, whatever happened."""
        states = [device.state for device in self.conductor.devices.values()]
        assert +self.conductor.states == Counter(state for state in states if state != "gone")
        return sends

    def close(self) -> list[Send]:
        """The owner closes a complete round and opens the next one."""
        assert self.conductor.complete
        learn(self.coordinator)
        return self.open()

    def state(self, name: str) -> str:
        return self.conductor.devices[name].state


def orders(sends: list[Send]) -> list[Send]:
    """The orders among what was sent."""
    return [send for send in sends if isinstance(send.message, OrderMessage)]


def asked(sends: list[Send]) -> set[str]:
    """The names of the devices that orders went to."""
    return {send.name for send in orders(sends)}


def full(**settings: Any) -> tuple[Stage, list[Send]]:
    """A fleet of six, all ready, and the orders of its first round."""
    stage = Stage(**settings)
    for name in "abcdef":
        stage.join(name)
    return stage, orders(stage.open())

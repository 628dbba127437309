"""The memory of a device of each method: planned to the byte, and the peak of a real process. No data is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreseed.config import Config, load, methods
from foreseed.data import HeldOut
from foreseed.meter import DeviceMemory
from foreseed.methods import make_task

_IMAGES = 32
_CLASSES = {"cifar10": 10, "cifar100": 100}

_MODELS = {"LeNet-5": "lenet5", "ResNet-20": "resnet20"}
_TABLE_1 = {
    "fedavg": "1x", "zerofl": ">= 1x", "prunefl": ">= 1x", "feddst": ">= 1x", "fedtiny": ">= 1x", "lotteryfl": "",
    "baffle": "<< 1x", "ntk-baffle": "<< 1x",
}  # fmt: skip
_TABLE_6 = {
    "LeNet-5": {"fedavg": "1617 MB", "baffle": "166 MB", "ntk-baffle": "166 MB"},
    "ResNet-20": {"fedavg": "1671 MB", "baffle": "330 MB", "ntk-baffle": "330 MB"},
}
"""What the paper says, method by method; it has no line for LotteryFL."""


@dataclass(frozen=True)
class MethodMemory:
    """A line of table 1."""

    model: str
    method: str
    prunes: bool
    bp_free: bool
    memory: DeviceMemory
    said: str
    """By the paper."""


def device_memories(
    name: str, overrides: Sequence[str] = (), progress: Callable[[str], None] = lambda _: None
) -> list[MethodMemory]:
    """The lines of table 1, or of table 6, which has three of its methods, for both models."""
    said = dict.fromkeys(_MODELS, _TABLE_1) if name == "table1" else _TABLE_6
    rows = []
    for label, model in _MODELS.items():
        for method, words in said[label].items():
            progress(f"{label}, {method}")
            config = load(f"paper/cifar10-{model}-k50", [f"method={method}", *overrides])
            rows.append(_measured(label, config, method, words))
    return rows


def _measured(label: str, config: Config, name: str, said: str) -> MethodMemory:
    method = methods()[name]
    task = make_task(config, _blank(_CLASSES[config.data.set]))
    memory = method.device_memory(task, method.init(task))
    prunes = name not in ("fedavg", "baffle")
    return MethodMemory(label, name, prunes, not method.backpropagates, memory, said)


def _blank(classes: int) -> HeldOut:
    """Images of nothing: memory depends on shapes alone."""
    images, labels = np.zeros((_IMAGES, 3, 32, 32), np.uint8), np.zeros(_IMAGES, np.uint8)
    return HeldOut(images, labels, tuple(map(str, range(classes))), (0.5,) * 3, (0.25,) * 3)

"""Every table and figure of the paper that runs can make, arm by arm, with the numbers that it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from foreseed.config import Config, ConfigError, load
from foreseed.config.errors import did_you_mean


@dataclass(frozen=True)
class PaperArm:
    """A line of a table or a curve of a figure: the experiment that makes it, and what the paper says of it."""

    label: str
    experiment: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    accuracy: float | None = None
    """Highest test accuracy in percent; None for an arm that the paper does not have."""
    flops: float | None = None
    """Of a forward pass, in times FedAvg's."""
    memory: float | None = None
    """Peak of a device, in times FedAvg's."""

    @property
    def name(self) -> str:
        """The folder of its run: items that have an arm in common share it."""
        given = "".join(f"-{value}" for value in self.changes.values())
        return self.experiment.removeprefix("paper/").removeprefix("pruning-") + given

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Its experiment, with what the user wants otherwise."""
        changed = [f"{key}={value}" for key, value in self.changes.items()]
        return load(self.experiment, [*changed, *overrides, f"name={self.name}"])


@dataclass(frozen=True)
class Item:
    """A table or a figure."""

    name: str
    caption: str
    arms: tuple[PaperArm, ...] = ()
    """None where no training is needed."""
    note: str = ""


_Arms: TypeAlias = tuple[PaperArm, ...]


def _pruning_arms() -> _Arms:
    lenet, resnet = "paper/pruning-cifar10-lenet5", "paper/pruning-cifar100-resnet20"

    def of(
        model: str,
        experiment: str,
        method: str,
        label: str,
        accuracy: float | None = None,
        flops: float | None = None,
        memory: float | None = None,
        *changes: tuple[str, Any],
    ) -> PaperArm:
        named = {"method": method} if method else {}
        return PaperArm(f"{model}, {label}", experiment, {**named, **dict(changes)}, accuracy, flops, memory)

    return (
        of("LeNet-5", lenet, "fedavg", "FedAvg", 54.07, 1.0, 1.0),
        of("LeNet-5", "paper/feddst", "", "FedDST", 46.43, 0.20, 1.0),
        of("LeNet-5", "paper/prunefl", "", "PruneFL", 52.86, 1.0, 1.0),
        of("LeNet-5", lenet, "ntk-fedavg", "NTK-Rand", 53.65, 0.72, 0.10),
        of("LeNet-5", lenet, "ntk-fedavg", "NTK-Ori", None, None, None, ("prune.pruner", "ntk-ori")),
        of("LeNet-5", "paper/zerofl", "", "ZeroFL"),
        of("LeNet-5", "paper/fedtiny", "", "FedTiny"),
        of("LeNet-5", "paper/lotteryfl", "", "LotteryFL"),
        of("ResNet-20", resnet, "fedavg", "FedAvg", 31.69, 1.0, 1.0),
        of("ResNet-20", resnet, "feddst", "FedDST", 34.88, 0.43, 1.0),
        of("ResNet-20", resnet, "prunefl", "PruneFL"),
        of("ResNet-20", resnet, "ntk-fedavg", "NTK-Rand", 33.57, 0.43, 1.0),
        of("ResNet-20", resnet, "fedavg", "FedAvg, 1 epoch", 34.19, 1.0, 1.0, ("train.epochs", 1)),
        of("ResNet-20", resnet, "ntk-fedavg", "NTK-Rand, 1 epoch", 34.50, 0.43, 0.20, ("train.epochs", 1)),
    )


_KS = (50, 100, 200)
_MAXIMA: dict[str, dict[str, tuple[tuple[float, ...], tuple[float, ...], float]]] = {
    "cifar10": {
        "lenet5": ((39.68, 42.70, 46.39), (35.06, 36.35, 42.59), 53.20),
        "resnet20": ((35.74, 38.58, 45.27), (34.74, 36.65, 43.81), 48.26),
    },
    "cifar100": {
        "lenet5": ((5.59, 6.80, 8.35), (4.40, 4.94, 5.95), 23.52),
        "resnet20": ((12.04, 14.84, 17.73), (11.54, 14.41, 15.96), 34.19),
    },
}
"""Highest accuracies of NTK-BAFFLE and Vanilla-BAFFLE with K of 50, 100 and 200, and of FedAvg."""


def _forward_arms(data: str, models: Sequence[str] = ("lenet5", "resnet20"), ks: Sequence[int] = _KS) -> _Arms:
    names = {"lenet5": "LeNet-5", "resnet20": "ResNet-20"}
    arms = []
    for model in models:
        ntk, vanilla, fedavg = _MAXIMA[data][model]
        for k, ours, theirs in zip(_KS, ntk, vanilla, strict=True):
            if k in ks:
                experiment = f"paper/{data}-{model}-k{k}"
                label = f"{names[model]}, K = {k}"
                arms.append(PaperArm(f"{label}, NTK-BAFFLE", experiment, {}, ours))
                arms.append(PaperArm(f"{label}, Vanilla-BAFFLE", experiment, {"method": "baffle"}, theirs))
        arms.append(PaperArm(f"{names[model]}, FedAvg", f"paper/{data}-{model}-k50", {"method": "fedavg"}, fedavg))
    return tuple(arms)


def _items() -> dict[str, Item]:
    pruning, cifar10, cifar100 = _pruning_arms(), _forward_arms("cifar10"), _forward_arms("cifar100")
    items = (
        Item(
            "table1",
            "What each method asks of a device: pruning, backpropagation and peak memory",
            note="the paper says >= 1x and << 1x; here each is planned to the byte, and measured in a process",
        ),
        Item("table2", "Accuracy, FLOPs and peak memory of federated pruning, CIFAR-10 and CIFAR-100", pruning),
        Item("table3", "Highest accuracy without backpropagation, CIFAR-10", cifar10),
        Item("table4", "Highest accuracy without backpropagation, CIFAR-100", cifar100),
        Item(
            "table6",
            "Peak memory of backpropagation, Vanilla-BAFFLE and NTK-BAFFLE",
            note="the paper's megabytes are those of a GPU library; what a device needs is planned and measured here",
        ),
        Item("figure1", "Accuracy of federated pruning by round, CIFAR-10", pruning[:8]),
        Item("figure2", "Accuracy by round, LeNet-5 on CIFAR-10, K = 200", _forward_arms("cifar10", ["lenet5"], [200])),
        Item("figure3", "Accuracy by FLOPs, CIFAR-10", cifar10),
        Item("figure5", "Accuracy by FLOPs, CIFAR-100", cifar100),
    )
    return {item.name: item for item in items}


ITEMS = _items()
"""By name. Table 5 lists the authors' boards; figure 4, their test-bed, is `foreseed testbed`."""


def find_item(name: str) -> Item:
    """The table or figure of this name."""
    if name not in ITEMS:
        elsewhere = {"table5": "it lists the authors' boards", "figure4": "it is a real fleet: foreseed testbed"}
        if name in elsewhere:
            raise ConfigError(f"{name} is not made by runs here: {elsewhere[name]}")
        raise ConfigError(f"{name}: expected one of {', '.join(ITEMS)}{did_you_mean(name, list(ITEMS))}")
    return ITEMS[name]

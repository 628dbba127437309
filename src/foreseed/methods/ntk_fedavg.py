"""NTK-FedAvg: FedAvg by backpropagation on a foresight-pruned model (the paper's pruning table)."""

from foreseed.config import Method, enter
from foreseed.methods import fedavg

enter(
    Method(
        "ntk-fedavg", "pruned, backpropagation", fedavg.init, fedavg.round, fedavg.device_memory, prunes=True,
        backpropagates=True,
    )
)  # fmt: skip

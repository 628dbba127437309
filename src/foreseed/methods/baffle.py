"""BAFFLE: NTK-BAFFLE without the pruning (Feng et al., Does Federated Learning Really Need Backpropagation?)."""

from foreseed.config import Method, enter
from foreseed.methods import ntk_baffle

enter(Method("baffle", "dense, forward passes only", ntk_baffle.init, ntk_baffle.round, ntk_baffle.device_memory))

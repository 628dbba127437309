"""NTK-FedAvg: FedAvg by backpropagation on a foresight-pruned model (the paper's pruning table).

The world of this method is pruned; the training is FedAvg's.
"""

from foreseed.methods.fedavg import arrays as arrays
from foreseed.methods.fedavg import init as init
from foreseed.methods.fedavg import restore as restore
from foreseed.methods.fedavg import round as round

"""BAFFLE: NTK-BAFFLE without the pruning (Feng et al., Does Federated Learning Really Need Backpropagation?).

The world of this method is dense (`Config.effective_density` is 1); the training is the same.
"""

from foreseed.methods.ntk_baffle import arrays as arrays
from foreseed.methods.ntk_baffle import init as init
from foreseed.methods.ntk_baffle import restore as restore
from foreseed.methods.ntk_baffle import round as round

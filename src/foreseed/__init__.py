"""foreseed: federated learning for devices too small for backpropagation."""

__version__ = "0.1.0.dev0"

"""What runs on a device: its samples, and its answer to an order. Standard library and the engine only."""

from foreseed.device.probing import Answer, Order, OrderError, answer
from foreseed.device.shard import Shard, open_shard

__all__ = ["Answer", "Order", "OrderError", "Shard", "answer", "open_shard"]

"""One place that counts: FLOPs, forward passes and memory."""

from foreseed.meter.flops import Work, bp_free_work, bp_work, dense_forward_flops, forward_flops
from foreseed.meter.memory import BpMemory, planned_bp_bytes

__all__ = [
    "BpMemory",
    "Work",
    "bp_free_work",
    "bp_work",
    "dense_forward_flops",
    "forward_flops",
    "planned_bp_bytes",
]

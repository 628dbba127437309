"""One place that counts: FLOPs, forward passes and memory."""

from foreseed.meter.device import DeviceMemory, bp_free_memory, bp_memory
from foreseed.meter.flops import Work, bp_free_work, bp_work, dense_forward_flops, forward_flops, forward_work
from foreseed.meter.memory import BpMemory, planned_bp_bytes
from foreseed.meter.process import MeterError, bare_peak_bytes, device_peak_bytes, process_peak_bytes

__all__ = [
    "BpMemory",
    "DeviceMemory",
    "MeterError",
    "Work",
    "bare_peak_bytes",
    "bp_free_memory",
    "bp_free_work",
    "bp_memory",
    "bp_work",
    "dense_forward_flops",
    "device_peak_bytes",
    "forward_flops",
    "forward_work",
    "planned_bp_bytes",
    "process_peak_bytes",
]

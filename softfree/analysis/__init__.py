"""Measurements for tables and figures: complexity, time, memory, and what the attention layers do."""

from softfree.analysis.capture import AttentionCapture, AttentionLayer, SoftLayer, capture_attention
from softfree.analysis.complexity import count_macs, count_parameters
from softfree.analysis.environment import describe_environment, write_csv
from softfree.analysis.measure import (
    Timing,
    capture_graph,
    copy_bandwidth,
    peak_extra_memory,
    time_call,
    time_graph,
    time_in_turn,
    time_queued,
)

__all__ = [
    "AttentionCapture",
    "AttentionLayer",
    "SoftLayer",
    "Timing",
    "capture_attention",
    "capture_graph",
    "copy_bandwidth",
    "count_macs",
    "count_parameters",
    "describe_environment",
    "peak_extra_memory",
    "time_call",
    "time_graph",
    "time_in_turn",
    "time_queued",
    "write_csv",
]

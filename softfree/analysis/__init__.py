"""What a table or a figure needs: complexity, time, memory."""

from softfree.analysis.complexity import count_macs, count_parameters
from softfree.analysis.environment import describe_environment, write_csv
from softfree.analysis.measure import (
    Timing,
    copy_bandwidth,
    peak_extra_memory,
    time_call,
    time_graph,
    time_in_turn,
    time_queued,
)

__all__ = [
    "Timing",
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

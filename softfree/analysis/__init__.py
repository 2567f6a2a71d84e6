"""What a table or a figure needs: complexity, time, memory."""

from softfree.analysis.complexity import count_macs, count_parameters
from softfree.analysis.measure import Timing, peak_extra_memory, time_call

__all__ = ["Timing", "count_macs", "count_parameters", "peak_extra_memory", "time_call"]

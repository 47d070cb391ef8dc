"""The start time of this process, in wall-clock time, to a hundredth of a second."""

import os
import time
from pathlib import Path


def find_start() -> float:
    """The time of the start, as `time.time()` gives it."""
    ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text("utf-8").split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")

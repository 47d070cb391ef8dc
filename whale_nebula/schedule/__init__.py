"""Pipeline schedules: instructions of each stage, limits of micro-batches in flight, and a simulator.

Pure Python, independent of tensors and of a cluster. A custom schedule is another entry of `SCHEDULES`.
"""

from whale_nebula.schedule.schedules import SCHEDULES

__all__ = ["SCHEDULES"]

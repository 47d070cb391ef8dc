"""Pipeline schedules: instructions of each stage, limits of what is in flight, and a simulator.

Pure Python: nothing here knows tensors, and everything can be tried without a cluster. A schedule of one's own is
another entry of `SCHEDULES`.
"""

from whale_nebula.schedule.schedules import SCHEDULES

__all__ = ["SCHEDULES"]

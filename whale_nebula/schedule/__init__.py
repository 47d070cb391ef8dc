"""Pipeline schedules: instructions of each stage, limits of what is in flight, and a simulator.

Pure Python: nothing here knows tensors, and everything can be tried without a cluster.
"""

from whale_nebula.schedule.drawing import draw, picture
from whale_nebula.schedule.lines import Hop, Line, Work, hop_of_seconds, pace, uniform
from whale_nebula.schedule.schedules import (
    DEFAULT,
    SCHEDULES,
    Backward,
    Forward,
    Fused,
    Instruction,
    Limit,
    Pace,
    instructions,
    limit_of,
    limits,
    to_text,
)
from whale_nebula.schedule.simulate import Span, Timeline, run_lists, simulate

__all__ = [
    "DEFAULT",
    "SCHEDULES",
    "Backward",
    "Forward",
    "Fused",
    "Hop",
    "Instruction",
    "Limit",
    "Line",
    "Pace",
    "Span",
    "Timeline",
    "Work",
    "draw",
    "hop_of_seconds",
    "instructions",
    "limit_of",
    "limits",
    "pace",
    "picture",
    "run_lists",
    "simulate",
    "to_text",
    "uniform",
]

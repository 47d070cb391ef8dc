"""Measure the link between two clusters, between two workers and over the links that a run would use."""

from whale_nebula.launch.line.advice import Crossing, LineFound
from whale_nebula.launch.line.seat import Seat, measure

__all__ = ["Crossing", "LineFound", "Seat", "measure"]

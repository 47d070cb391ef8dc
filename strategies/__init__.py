"""Placement maps for `nb.place`, and training methods. Installed as `whale_nebula.strategies`."""

from .curriculum import ByTokens, Curriculum
from .low_rank_cut import low_rank_cut
from .one_bit import OneBitAdam, OneBitLamb
from .partition import by_parameters, halves

__all__ = ["ByTokens", "Curriculum", "OneBitAdam", "OneBitLamb", "by_parameters", "halves", "low_rank_cut"]

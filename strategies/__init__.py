"""Functions from (model, clusters) to a map for `nb.place`; installed as `whale_nebula.strategies`."""

from .by_parameters import by_parameters
from .halves import halves
from .low_rank_cut import low_rank_cut

__all__ = ["by_parameters", "halves", "low_rank_cut"]

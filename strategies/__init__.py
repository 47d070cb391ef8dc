"""Maps for `nb.place`, made of a model and clusters; methods of training. Installed as `whale_nebula.strategies`."""

from .by_parameters import by_parameters
from .curriculum import ByTokens, Curriculum
from .halves import halves
from .low_rank_cut import low_rank_cut

__all__ = ["ByTokens", "Curriculum", "by_parameters", "halves", "low_rank_cut"]

"""Functions from (model, clusters) to a map for `nb.place`; installed as `whale_nebula.strategies`."""

from .by_parameters import by_parameters
from .halves import halves

__all__ = ["by_parameters", "halves"]

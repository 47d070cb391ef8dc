"""The models that examples and benchmarks train; installed as `whale_nebula.models`."""

from .transformer import Sizes, transformer

__all__ = ["Sizes", "transformer"]

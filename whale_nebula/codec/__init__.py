"""Codecs, which compress the tensors of boundaries: plain data, combined by `>>`.

>>> import whale_nebula as nb
>>> str(nb.codec.SVD(0.6) >> nb.codec.FP16())
'svd(0.6) >> fp16'

At most one *structure* (SVD, Rank, TopK: fewer numbers; Axes: a form that needs fewer bits), then one *precision*
(FP16, BF16, INT8, INT4, Coded: fewer bits in each). `register` adds a codec of your own.
"""

from whale_nebula.codec.axes import Axes
from whale_nebula.codec.entropy_coding import Coded
from whale_nebula.codec.objects import Chain, Codec, Cost, Precision, Reduced, Structure
from whale_nebula.codec.packing import Part
from whale_nebula.codec.precisions import BF16, FP16, INT4, INT8, Bits
from whale_nebula.codec.registry import CODECS, from_flags, is_built, parse, register
from whale_nebula.codec.structures import SVD, Rank, TopK

__all__ = [
    "BF16",
    "CODECS",
    "FP16",
    "INT4",
    "INT8",
    "SVD",
    "Axes",
    "Bits",
    "Chain",
    "Codec",
    "Coded",
    "Cost",
    "Part",
    "Precision",
    "Rank",
    "Reduced",
    "Structure",
    "TopK",
    "from_flags",
    "is_built",
    "parse",
    "register",
]

"""Codecs, which make the tensors of boundaries smaller: plain data, combined by `>>`.

>>> import whale_nebula as nb
>>> str(nb.codec.SVD(0.6) >> nb.codec.FP16())
'svd(0.6) >> fp16'

At most one *structure* (SVD, Rank, TopK, Rows: fewer numbers; Axes: a form that fewer bits hold), then one *precision*
(FP16, BF16, INT8, INT4, TURNED4, INT3, INT2, INT1, Mixed, Coded: fewer bits in each). `register` enters a codec of your
own.
"""

from whale_nebula.codec.axes import Axes
from whale_nebula.codec.entropy_coding import Coded
from whale_nebula.codec.objects import Chain, Codec, Part, Precision, Reduced, Structure
from whale_nebula.codec.precisions import BF16, FP16, INT1, INT2, INT3, INT4, INT8, TURNED4, Bits
from whale_nebula.codec.registry import CODECS, from_flags, is_built, parse, register
from whale_nebula.codec.strong import Mixed, Rows
from whale_nebula.codec.structures import SVD, Rank, TopK

__all__ = [
    "BF16",
    "CODECS",
    "FP16",
    "INT1",
    "INT2",
    "INT3",
    "INT4",
    "INT8",
    "SVD",
    "TURNED4",
    "Axes",
    "Bits",
    "Chain",
    "Codec",
    "Coded",
    "Mixed",
    "Part",
    "Precision",
    "Rank",
    "Reduced",
    "Rows",
    "Structure",
    "TopK",
    "from_flags",
    "is_built",
    "parse",
    "register",
]

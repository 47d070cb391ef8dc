"""How a boundary's tensor is made small: codecs as plain data, combined by `>>`.

>>> import whale_nebula as nb
>>> str(nb.codec.SVD(0.6) >> nb.codec.FP16())
'svd(0.6) >> fp16'

At most one *structure* (SVD, Rank, TopK, Rows: fewer numbers; Axes: a form that fewer bits hold), then one *precision*
(FP16, BF16, INT8, INT4, TURNED4, INT3, INT2, INT1, Mixed, Coded: fewer bits in each). `register` enters a codec of your
own.
"""

from whale_nebula.codec.axes import Axes
from whale_nebula.codec.coded import Coded
from whale_nebula.codec.flags import from_flags
from whale_nebula.codec.mixed import Mixed
from whale_nebula.codec.objects import Chain, Codec, Precision, Reduced, Structure
from whale_nebula.codec.parts import Part
from whale_nebula.codec.precisions import BF16, FP16, INT1, INT2, INT3, INT4, INT8, TURNED4, Bits
from whale_nebula.codec.registry import CODECS, is_built, register
from whale_nebula.codec.strong import Rows
from whale_nebula.codec.structures import SVD, Rank, TopK
from whale_nebula.codec.text import parse

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

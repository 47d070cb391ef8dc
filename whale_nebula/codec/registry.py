"""The codecs by name; a codec of the user's own is entered here.

```python
@nb.codec.register
@dataclass(frozen=True)
class Sign(nb.codec.Precision):
    name = "sign"
    def parts(self, dims, dtype): ...
    def encode(self, x, key=None): ...
    def decode(self, parts, dims, dtype): ...
```
"""

from __future__ import annotations

from typing import TypeVar

from whale_nebula.codec.axes import Axes
from whale_nebula.codec.coded import Coded
from whale_nebula.codec.mixed import Mixed
from whale_nebula.codec.objects import Codec, Precision, Structure
from whale_nebula.codec.precisions import BF16, FP16, INT1, INT2, INT3, INT4, INT8, TURNED4, Bits
from whale_nebula.codec.strong import Rows
from whale_nebula.codec.structures import SVD, Rank, TopK
from whale_nebula.errors import OptionError

_BUILT = (SVD, Rank, TopK, Rows, Axes, FP16, BF16, INT8, INT4, TURNED4, INT3, INT2, INT1, Mixed, Coded, Bits)
CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in _BUILT}
_Kind = TypeVar("_Kind", bound=type[Codec])
_METHODS = {Precision: ("parts", "encode", "decode"), Structure: ("numbers", "reduce", "expand")}
_RETURNING = ("reduce_back", "expand_back")
_WORDS = ("none", "auto", "default")
"""What a scope says where it names no codec."""


def register(kind: _Kind) -> _Kind:
    """Enter a codec under its `name`: plans and texts know it from then on. Every process has to do so."""
    layer = next((base for base in _METHODS if isinstance(kind, type) and issubclass(kind, base)), None)
    if layer is None:
        raise OptionError(
            f"{kind!r} is no codec",
            why="a codec is a precision (fewer bits) or a structure (fewer numbers)",
            mend="class Mine(nb.codec.Precision): ...",
        )
    needed = (*_METHODS[layer], *(_RETURNING if getattr(kind, "returns", False) else ()))
    missing = [name for name in needed if getattr(kind, name) is getattr(layer, name)]
    if missing:
        raise OptionError(f"{kind.__name__} lacks {', '.join(missing)}", mend=f"def {missing[0]}(self, ...)")
    if not kind.name.isidentifier() or kind.name != kind.name.lower() or kind.name in _WORDS:
        raise OptionError(f"{kind.name!r} cannot name a codec", mend=f"name = {kind.__name__.lower()!r}")
    if CODECS.get(kind.name, kind).__qualname__ != kind.__qualname__:
        raise OptionError(f"a codec is called {kind.name!r} already", mend=f"name = '{kind.name}2'")
    CODECS[kind.name] = kind
    return kind


def is_built(codec: Codec) -> bool:
    """Whether this codec can run: whether plans know it by its name.

    >>> is_built(FP16()), is_built(SVD(0.6) >> FP16())
    (True, True)
    """
    return all(CODECS.get(part.name) is type(part) for part in codec.members)

"""The registry of codecs by name, which also accepts users' codecs.

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

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from whale_nebula.codec.axes import Axes
from whale_nebula.codec.entropy_coding import Coded
from whale_nebula.codec.objects import Chain, Codec, Precision, Structure
from whale_nebula.codec.precisions import BF16, FP16, INT4, INT8, Bits
from whale_nebula.codec.structures import BASES, SVD, Rank, TopK
from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean

_BUILT = (SVD, Rank, TopK, Axes, FP16, BF16, INT8, INT4, Coded, Bits)
CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in _BUILT}
_Kind = TypeVar("_Kind", bound=type[Codec])
_METHODS = {Precision: ("parts", "encode", "decode"), Structure: ("numbers", "reduce", "expand")}
_RETURN_METHODS = ("reduce_back", "expand_back")
_USUAL: Mapping[str, float] = MappingProxyType({"svd": 0.6, "rank": 96, "topk": 0.1, "coded": 2.3})
"""The argument of each built-in codec that needs one, for examples in errors."""
_RESERVED_NAMES = ("none", "auto", "default")
"""Words of codec options that are not names of codecs."""


def register(kind: _Kind) -> _Kind:
    """Register a codec under its `name`, by which plans and texts refer to it. Every process must register it."""
    layer = next((base for base in _METHODS if isinstance(kind, type) and issubclass(kind, base)), None)
    if layer is None:
        raise OptionError(
            f"{kind!r} is not a codec",
            why="a codec is a precision (fewer bits) or a structure (fewer numbers)",
            mend="class Mine(nb.codec.Precision): ...",
        )
    needed = (*_METHODS[layer], *(_RETURN_METHODS if getattr(kind, "returns", False) else ()))
    missing = [name for name in needed if getattr(kind, name) is getattr(layer, name)]
    if missing:
        raise OptionError(f"{kind.__name__} lacks {', '.join(missing)}", mend=f"def {missing[0]}(self, ...)")
    if not kind.name.isidentifier() or kind.name != kind.name.lower() or kind.name in _RESERVED_NAMES:
        raise OptionError(f"{kind.name!r} is not a valid codec name", mend=f"name = {kind.__name__.lower()!r}")
    if CODECS.get(kind.name, kind).__qualname__ != kind.__qualname__:
        raise OptionError(f"a codec with the name {kind.name!r} is already registered", mend=f"name = '{kind.name}2'")
    CODECS[kind.name] = kind
    return kind


def is_built(codec: Codec) -> bool:
    """Whether a codec is registered, so that it can run.

    >>> is_built(FP16()), is_built(SVD(0.6) >> FP16())
    (True, True)
    """
    return all(CODECS.get(part.name) is type(part) for part in codec.members)


_PART = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*")


def parse(text: str, others: tuple[str, ...] = ()) -> Codec:
    """Parse a codec's text form, the inverse of `str`. `others` are words that are valid instead of a codec and handled
    by the caller; errors list them too.

    >>> parse("svd(0.6) >> fp16")
    SVD(ratio=0.6) >> FP16()
    """
    pieces = text.split(">>")
    known = (*(name for name, kind in CODECS.items() if kind is not Bits), *others * (len(pieces) == 1))
    parts = tuple(_parse_part(piece, text, known) for piece in pieces)
    return parts[0] if len(parts) == 1 else Chain(parts)


def _parse_part(piece: str, text: str, known: Sequence[str]) -> Codec:
    match = _PART.fullmatch(piece)
    if match is None:
        raise _syntax_error(text, f"{piece.strip()!r} is not a codec name with optional arguments")
    name, arguments = match[1], match[2]
    kind = CODECS.get(name.lower())
    if kind is None:
        raise OptionError(f"no codec is called {name!r}", where=repr(text), mend=did_you_mean(name, known))
    values = [_parse_argument(argument) for argument in (arguments or "").split(",") if argument.strip()]
    try:
        inspect.signature(kind).bind(*values)
        return kind(*values)
    except TypeError as error:
        raise OptionError(f"{text!r} is not a codec", why=f"{kind.name}: {error}", mend=_example(kind)) from None
    except OptionError as error:
        if kind.name not in _USUAL or not error.what.startswith(f"{kind.__name__}("):
            raise
        what = error.what.replace(kind.__name__, kind.name, 1)
        raise OptionError(what, where=repr(text), why=error.why, mend=_example(kind)) from None


def _example(kind: type[Codec]) -> str:
    """The text form of a codec with usual arguments, or else with the names of those that it needs."""
    parameters = inspect.signature(kind).parameters.values()
    needed = [
        each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    arguments = _USUAL.get(kind.name, ", ".join(needed))
    return f"{kind.name}({arguments})" if arguments else kind.name


def _parse_argument(argument: str) -> object:
    word = argument.strip()
    if word in ("True", "False"):
        return word == "True"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _syntax_error(text: str, why: str) -> OptionError:
    return OptionError(f"{text!r} is not a codec", why=why, mend='write it like "svd(0.6) >> fp16" or "int8"')


def from_flags(
    *,
    svd: float | None = None,
    rank: int | None = None,
    topk: float | None = None,
    fp16: bool = False,
    bf16: bool = False,
    int8: bool = False,
    int4: bool = False,
    basis: str = "shared",
) -> Codec | None:
    """The codec of the flags of `nb.compress`; None if none is set.

    >>> str(from_flags(svd=0.6, fp16=True))
    'svd(0.6) >> fp16'
    """
    _check_basis(basis, rank)
    made = {
        "svd": None if svd is None else _make_codec("svd", svd, SVD),
        "rank": None if rank is None else _make_codec("rank", rank, partial(Rank, basis=basis)),
        "topk": None if topk is None else _make_codec("topk", topk, TopK),
    }
    bits = {FP16(): fp16, BF16(): bf16, INT8(): int8, INT4(): int4}
    structure = _choose_single("structure", {flag: codec for flag, codec in made.items() if codec is not None})
    precision = _choose_single("precision", {codec.name: codec for codec, flag in bits.items() if _is_set(codec, flag)})
    if structure is None or precision is None:
        return structure or precision
    return structure >> precision


def _make_codec(flag: str, value: Any, kind: Callable[[Any], Codec]) -> Codec:
    """Create a structure with one parameter; an error names the given flag."""
    try:
        return kind(value)
    except OptionError as error:
        problem = error.what.partition(f"({value!r})")[2]
        raise OptionError(f"{flag}={value!r}{problem}", why=error.why, mend=f"{flag}={_USUAL[flag]}") from None


def _choose_single(layer: str, codecs: dict[str, Codec]) -> Codec | None:
    if len(codecs) > 1:
        raise OptionError(
            f"{' and '.join(codecs)} exclude each other",
            why=f"a boundary has at most one {layer}",
            mend=f"keep one of them: {', or '.join(f'{flag}=...' for flag in codecs)}",
        )
    return next(iter(codecs.values()), None)


def _is_set(codec: Codec, flag: object) -> bool:
    if not isinstance(flag, bool):
        raise OptionError(f"{codec.name}={flag!r} is neither True nor False", mend=f"{codec.name}=True")
    return flag


def _check_basis(basis: str, rank: int | None) -> None:
    if basis not in BASES:
        raise OptionError(f"no basis is called {basis!r}", mend=did_you_mean(basis, BASES))
    if basis != "shared" and rank is None:
        raise OptionError(
            f"basis={basis!r} without a rank",
            why="the basis is the one that rank= projects on",
            mend=f"rank=96, basis={basis!r}",
        )

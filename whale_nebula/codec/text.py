"""The text form of a codec, as plans print it: "svd(0.6) >> fp16"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from whale_nebula.codec.objects import Chain, Codec
from whale_nebula.codec.precisions import Bits
from whale_nebula.codec.registry import CODECS
from whale_nebula.errors import OptionError
from whale_nebula.errors.suggestions import did_you_mean

_PART = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*")


def parse(text: str, others: tuple[str, ...] = ()) -> Codec:
    """The codec that a text names; `str` of a codec gives that text again. `others` are words that may stand for a
    whole text, and that the caller reads: a mend has them, too.

    >>> parse("svd(0.6) >> fp16")
    SVD(ratio=0.6) >> FP16()
    """
    pieces = text.split(">>")
    known = (*(name for name, kind in CODECS.items() if kind is not Bits), *others * (len(pieces) == 1))
    parts = tuple(_part(piece, text, known) for piece in pieces)
    return parts[0] if len(parts) == 1 else Chain(parts)


def _part(piece: str, text: str, known: Sequence[str]) -> Codec:
    match = _PART.fullmatch(piece)
    if match is None:
        raise _unreadable(text, f"{piece.strip()!r} is no codec with its arguments")
    name, arguments = match[1], match[2]
    kind = CODECS.get(name.lower())
    if kind is None:
        raise OptionError(f"no codec is called {name!r}", where=repr(text), mend=did_you_mean(name, known))
    values = [_value(argument) for argument in (arguments or "").split(",") if argument.strip()]
    try:
        return kind(*values)
    except TypeError:
        raise _unreadable(text, f"{kind.name} does not take {len(values)} arguments") from None


def _value(argument: str) -> object:
    word = argument.strip()
    if word in ("True", "False"):
        return word == "True"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _unreadable(text: str, why: str) -> OptionError:
    return OptionError(f"{text!r} is no codec", why=why, mend='write it like "svd(0.6) >> fp16" or "int8"')

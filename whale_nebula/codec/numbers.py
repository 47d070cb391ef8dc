"""How frames name codecs: by 16 bits of their text, so that both sides know without a list."""

from __future__ import annotations

import zlib
from functools import lru_cache

from whale_nebula.codec.fitting import precision_in
from whale_nebula.codec.objects import Codec
from whale_nebula.codec.precisions import Plain
from whale_nebula.codec.way import Way


def number(way: Way, codec: Codec | None) -> int:
    """The number of a codec among those of a way, never 0; None is what encodes nothing, and leaves out rows at most.

    >>> from whale_nebula.codec.way import parse_way
    >>> way = parse_way("int4, ramp int8 below 0.05")
    >>> [number(way, codec) > 0 for codec in (*way.rungs, None)], number(way, way.codec) == number(way, None)
    ([True, True, True], False)
    """
    return next(found for found, each in by_number(way).items() if each == codec)


@lru_cache(maxsize=1024)
def by_number(way: Way) -> dict[int, Codec | None]:
    """The codecs that may come on a way: those of its ladder, the precisions of each alone, and none.

    Two whose texts give the same 16 bits have neighbouring numbers: the order is the way's.
    """
    found: dict[int, Codec | None] = {}
    for codec in (None, *way.rungs, *map(precision_in, way.rungs)):
        if codec not in found.values():
            found[_free(zlib.crc32(str(codec or Plain()).encode()) % 0xFFFF + 1, found)] = codec
    return found


def numbers(way: Way) -> frozenset[int]:
    """Their numbers."""
    return frozenset(by_number(way))


def _free(wanted: int, taken: dict[int, Codec | None]) -> int:
    """The first from the wanted one on that is not taken."""
    return next(each % 0xFFFF + 1 for each in range(wanted - 1, wanted + len(taken)) if each % 0xFFFF + 1 not in taken)

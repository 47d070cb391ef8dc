"""The flags of `nb.compress` are sugar: they build one codec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from whale_nebula.codec.objects import Codec
from whale_nebula.codec.precisions import BF16, FP16, INT1, INT2, INT3, INT4, INT8
from whale_nebula.codec.structures import BASES, SVD, Rank, TopK
from whale_nebula.errors import OptionError
from whale_nebula.errors.suggestions import did_you_mean


def from_flags(
    *,
    svd: float | None = None,
    rank: int | None = None,
    topk: float | None = None,
    fp16: bool = False,
    bf16: bool = False,
    int8: bool = False,
    int4: bool = False,
    int3: bool = False,
    int2: bool = False,
    int1: bool = False,
    basis: str = "shared",
) -> Codec | None:
    """The codec that flags of `nb.compress` stand for, or None where none is set.

    >>> str(from_flags(svd=0.6, fp16=True))
    'svd(0.6) >> fp16'
    """
    _check_basis(basis, rank)
    made = {
        "svd": None if svd is None else _made("svd", svd, SVD, 0.6),
        "rank": None if rank is None else _made("rank", rank, partial(Rank, basis=basis), 96),
        "topk": None if topk is None else _made("topk", topk, TopK, 0.1),
    }
    bits = {FP16(): fp16, BF16(): bf16, INT8(): int8, INT4(): int4, INT3(): int3, INT2(): int2, INT1(): int1}
    structure = _one("structure", {flag: codec for flag, codec in made.items() if codec is not None})
    precision = _one("precision", {codec.name: codec for codec, flag in bits.items() if _is_set(codec, flag)})
    if structure is None or precision is None:
        return structure or precision
    return structure >> precision


def _made(flag: str, value: Any, kind: Callable[[Any], Codec], usual: float) -> Codec:
    """A structure of one number; what is wrong with it is said of the flag, which is what was written."""
    try:
        return kind(value)
    except OptionError as error:
        said = error.what.partition(f"({value!r})")[2]
        raise OptionError(f"{flag}={value!r}{said}", why=error.why, mend=f"{flag}={usual}") from None


def _one(layer: str, found: dict[str, Codec]) -> Codec | None:
    if len(found) > 1:
        raise OptionError(
            f"{' and '.join(found)} exclude each other",
            why=f"a boundary has at most one {layer}",
            mend=f"keep one of them: {', or '.join(f'{flag}=...' for flag in found)}",
        )
    return next(iter(found.values()), None)


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
            why="a basis is what rank= projects on",
            mend=f"rank=96, basis={basis!r}",
        )

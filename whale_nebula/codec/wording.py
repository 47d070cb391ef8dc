"""Descriptions of codecs in words, for printed plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale_nebula.codec.structures import RENEWED
from whale_nebula.codec.way import Way, parse_way

_MARKED = "only marked rows"
_RENEWED = {"rank": "the basis itself", "axes": "the axes themselves"}


def describe_bytes(amount: str, text: str) -> str:
    """So many bytes, and as what, in few words; the rest is in `details`.

    >>> [describe_bytes("32 KiB", text) for text in ("none", "int8, from step 100", "none, mask", "auto", "bits")]
    ['32 KiB', '32 KiB as int8', 'at most 32 KiB, only marked rows', 'at most 32 KiB', 'at most 32 KiB']
    """
    way = parse_way(text)
    amount = f"at most {amount}" if has_open_size(text) else amount
    if _codec(way):
        return f"{amount} {_codec(way)}"
    return f"{amount}, {_MARKED}" if way.mask is not None and not way.auto else amount


def has_open_size(text: str) -> bool:
    """Whether values decide how many bytes cross, so that sizes tell no more than the most it can be.

    >>> [has_open_size(text) for text in ("int8", "int8, mask", "auto")]
    [False, True, True]
    """
    way = parse_way(text)
    return way.auto or way.mask is not None or way.zstd or way.lossless


def details(text: str, *, back: bool = False, rungs: Sequence[str] = ()) -> str:
    """What `sent` leaves out; "" where that is nothing. With `back` it is a gradient's way; `rungs` are how much
    crosses on each rung of its ladder but the last, which is the one that `sent` tells.

    >>> details("int8"), details("none, mask"), details("int8, from step 100, zstd")
    ('', '', 'from step 100 on, then zstd where that helps')
    >>> details("int4, ramp fp16 int8 below 0.05", rungs=["2 KiB", "1 KiB"])
    'first 2 KiB as fp16, then 1 KiB as int8, each until the next one loses at most 5 %; then, as counted here, int4'
    """
    said = list(_conditions(parse_way(text), back, rungs))
    return "" if said == [_MARKED] and not _codec(parse_way(text)) else ", ".join(said)


def words(text: str, *, back: bool = False) -> str:
    """All of it: the codec, and under which conditions; "" for a tensor that crosses as it is.

    >>> words("rank(96) >> int4, from step 9, mask tokens"), words("none")
    ('as rank(96) >> int4, from step 9 on, with the basis itself every 50 steps, only rows that tokens marks', '')
    """
    way = parse_way(text)
    return ", ".join([each for each in (_codec(way), *_conditions(way, back)) if each])


def _codec(way: Way) -> str:
    return "" if way.auto or way.codec is None or way.lossless else f"as {way.codec}"


def _conditions(way: Way, back: bool, rungs: Sequence[str] = ()) -> Iterator[str]:
    if way.auto:
        yield f"as it is, or as {', '.join(way.ladder[1:-1])} or {way.ladder[-1]}: the mildest that computing hides"
    if way.lossless:
        yield "in as many bits as the numbers need"
    if way.start:
        yield f"from step {way.start} on"
    if way.ladder and not way.auto:
        sizes = [f"{size} as " for size in rungs] or [""] * len(way.ladder)
        ladder = ", then ".join(size + name for size, name in zip(sizes, way.ladder, strict=True))
        until = f"each until the next one loses at most {100 * way.bound:g} %"
        yield f"first {ladder}, {until}; then, as counted here, {way.precision}"
    structure = way.structure
    if structure is not None and structure.name in _RENEWED and not (back and structure.returns):
        yield f"with {_RENEWED[structure.name]} every {RENEWED} steps"
    if way.delta is not None:
        yield f"as differences to what the samples in {way.delta} were before"
    if way.mask is not None:
        yield f"only rows that {way.mask} marks" if way.mask else _MARKED
    if way.zstd:
        yield "then zstd where that helps"
    if way.nonfinite == "skip":
        yield "a step with a NaN is skipped"

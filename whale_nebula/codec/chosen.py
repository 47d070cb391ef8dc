"""The options of a compress scope become two ways to cross: forward, and backward for the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whale_nebula.codec.objects import Codec, Precision, Structure
from whale_nebula.codec.precisions import INT8, Integers
from whale_nebula.codec.structures import Rank
from whale_nebula.codec.text import parse
from whale_nebula.codec.way import AUTO, AUTO_LADDER, NONE, Way
from whale_nebula.errors import OptionError

DEFAULT = "default"
LADDER = ("fp16", "int8", "int4")
BOUND = 0.05
_ALWAYS = ("mask", "zstd", "nonfinite")


def ways(options: Mapping[str, Any], *, training: bool = True) -> tuple[Way, Way]:
    """What a scope says of a boundary and of its gradient. Steps without a gradient may have a codec of their own: it
    waits for no step and climbs no ladder.

    >>> [str(way) for way in ways({"codec": parse("rank(96) >> int4")})]
    ['rank(96) >> int4', 'rank(96) >> int8']
    """
    if not training and options.get("forward") is not None:
        forward = None if options["forward"] == NONE else options["forward"]
        return ways({"codec": forward, "backward": None} | {name: options.get(name) for name in _ALWAYS})
    codec, backward = options.get("codec"), options.get("backward", DEFAULT)
    common = _common(options if training else {**options, "delta": None})
    if codec == AUTO:
        auto = replace(common, auto=True, ladder=AUTO_LADDER, delta=None)
        return auto, auto if backward == DEFAULT else replace(common, codec=_back(None, backward))
    there = _without_learned(codec)
    back = _without_learned(_back(codec, backward))
    check_delta(common.delta, there)
    return _ramped(replace(common, codec=there), options), _ramped(replace(common, codec=back, delta=None), options)


def _common(options: Mapping[str, Any]) -> Way:
    mask = options.get("mask")
    return Way(
        start=int(options.get("start_step") or 0),
        delta=options.get("delta"),
        mask=None if mask is None or mask is False else "" if mask is True else str(mask),
        zstd=bool(options.get("zstd")),
        nonfinite=str(options.get("nonfinite") or "raise"),
    )


def _back(forward: Codec | None, backward: Any) -> Codec | None:
    """The gradient's codec: an object replaces all; a text, or the default, is the precision of what is left."""
    structure = None if forward is None else next((p for p in forward.members if isinstance(p, Structure)), None)
    kept = structure if structure is not None and structure.returns else None
    if backward == DEFAULT:
        backward = None if forward is None else INT8.name
    if backward is None:
        return kept
    chosen = parse(backward) if isinstance(backward, str) and backward != NONE else backward
    if chosen == NONE:
        return kept
    if isinstance(backward, str) and isinstance(chosen, Precision):
        return chosen if kept is None else kept >> chosen
    _check_back(chosen, kept)
    return chosen


def _check_back(backward: Codec, kept: Structure | None) -> None:
    own = next((p for p in backward.members if isinstance(p, Structure)), None)
    if own is not None and own.returns and own != kept:
        raise OptionError(
            f"backward={str(backward)!r} has a {own.name} that the forward has not",
            why="a gradient crosses in the subspace, or at the positions, of the tensor that it belongs to",
            mend=f"nb.compress({own!r} >> ..., backward='int8')",
        )


def _without_learned(codec: Codec | None) -> Codec | None:
    """A learned basis is a part of the model: what is left to do for what crosses is its precision."""
    if codec is None or not any(isinstance(part, Rank) and part.basis == "learned" for part in codec.members):
        return codec
    return next((part for part in codec.members if isinstance(part, Precision)), None)


def _ramped(way: Way, options: Mapping[str, Any]) -> Way:
    """With the precisions that come before its own."""
    ramp = options.get("ramp")
    if ramp is None or ramp is False or way.precision is None:
        return way
    bound = float(ramp) if isinstance(ramp, float) else BOUND
    names = LADDER if isinstance(ramp, bool | float) else tuple(str(name) for name in ramp)
    own = way.precision.name
    ladder = names[: names.index(own)] if own in names else names
    return replace(way, ladder=ladder, bound=bound) if ladder else way


def check_delta(delta: str | None, codec: Codec | None) -> None:
    """Differences are kept by integers that both sides add up alike."""
    if delta is not None and not isinstance(codec, Integers):
        raise OptionError(
            f"delta={delta!r} goes with integers (int8, int4 to int1), not with {str(codec or NONE)!r}",
            why="both sides add the same differences to what they keep, bit for bit: integers only",
            mend=f"nb.compress(int8=True, delta={delta!r})",
        )

"""The options of `nb.compress`: many words, one codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_nebula import codec as codecs
from whale_nebula.codec import Codec
from whale_nebula.errors import NebulaError, OptionError
from whale_nebula.scopes import values
from whale_nebula.scopes.scope import Missing
from whale_nebula.scopes.site import calling_site

_ONLY = "of the codecs only fp16 and bf16 have an engine so far"
_MEND = "nb.compress(fp16=True) or nb.compress(bf16=True)"


_OTHERS = ("ramp", "delta", "mask", "forward")


def checked_options(flags: Mapping[str, Any], codec: Any, backward: Any, **others: Any) -> dict[str, object]:
    """The options as a frame holds them: the flags have become a codec."""
    try:
        made = codecs.from_flags(**flags)
        chosen = _given(codec, made)
        back = backward if backward is None or backward == "default" else _codec("backward", backward)
    except OptionError as error:
        raise _located(error) from None
    if chosen is None and all(others[name] is None for name in _OTHERS):
        raise values.refuse("nb.compress() names no codec", mend="nb.compress(fp16=True)")
    if others["delta"] is not None:
        values.name("delta", others["delta"])
    return {"codec": chosen, "backward": back, **others, "start_step": _step(others["start_step"])}


def missing_of(options: Mapping[str, object]) -> Missing | None:
    """The first of these options that has no engine yet."""
    codec, backward = options["codec"], options["backward"]
    if codec == "auto":
        return Missing('nb.compress("auto")', _ONLY, _MEND)
    if isinstance(codec, Codec) and not codecs.is_built(codec):
        return Missing(f"codec {str(codec)!r}", _ONLY, _MEND)
    others = ["backward"] * isinstance(backward, Codec) + ["start_step"] * bool(options["start_step"])
    others += [name for name in _OTHERS if options[name] is not None]
    return Missing(f"nb.compress({others[0]}=...)", mend=f"leave {others[0]} out") if others else None


def _given(codec: Any, made: Codec | None) -> Codec | str | None:
    if codec is None:
        return made
    if made is not None:
        raise values.refuse(
            f"nb.compress({codec!r}) has flags as well, which say {str(made)!r}",
            why="flags build a codec, and a boundary has one",
            mend=f"nb.compress({codec!r}) or nb.compress({str(made)!r})",
        )
    return "auto" if codec == "auto" else _codec("codec", codec)


def _codec(option: str, value: Any) -> Codec:
    if isinstance(value, Codec):
        return value
    if isinstance(value, str):
        return codecs.parse(value)
    raise values.refuse(f"{option}={value!r} is no codec", mend=f"{option}=nb.codec.FP16()")


def _step(value: Any) -> int:
    number = values.integer("start_step", value)
    if number < 0:
        raise values.refuse(f"start_step={value!r} is before the first step", mend="start_step=0")
    return number


def _located(error: NebulaError) -> OptionError:
    """The same, and where the user wrote it."""
    return OptionError(error.what, where=str(calling_site()), why=error.why, mend=error.mend)

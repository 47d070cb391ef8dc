"""The options of `nb.compress`: many words, one codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_nebula import codec as codecs
from whale_nebula.codec import Codec
from whale_nebula.codec.chosen import ways
from whale_nebula.codec.way import NONFINITE
from whale_nebula.errors import NebulaError, OptionError
from whale_nebula.errors.suggestions import did_you_mean
from whale_nebula.scopes import values
from whale_nebula.scopes.scope import Missing
from whale_nebula.scopes.words import NOT_YET
from whale_nebula.site import calling_site

_OTHERS = {"codec": ("auto",), "backward": ("default", "none"), "forward": ("none",)}
"""What an option may say instead of a codec's name."""
_CHANGES = ("ramp", "delta", "mask", "forward", "zstd")


def checked_options(flags: Mapping[str, Any], codec: Any, backward: Any, **others: Any) -> dict[str, object]:
    """The options as a frame holds them: the flags have become a codec."""
    try:
        made = codecs.from_flags(**flags)
        chosen = _given(codec, made)
        options = {"codec": chosen, "backward": _backward(backward), **_others(others, chosen)}
        ways(options)
    except OptionError as error:
        raise _located(error) from None
    if chosen is None and not any(options[name] for name in _CHANGES):
        raise values.refuse("nb.compress() names no codec", mend="nb.compress(fp16=True)")
    return options


def _others(others: Mapping[str, Any], codec: Codec | str | None) -> dict[str, object]:
    if others["delta"] is not None:
        values.name("delta", others["delta"])
    return {
        **others,
        "start_step": _step(others["start_step"]),
        "ramp": _ramp(others["ramp"], codec),
        "mask": _mask(others["mask"]),
        "forward": None if others["forward"] is None else _none_or_codec("forward", others["forward"]),
        "zstd": _flag("zstd", others["zstd"]),
        "nonfinite": _one_of("nonfinite", others["nonfinite"], NONFINITE),
    }


def missing_of(options: Mapping[str, object]) -> Missing | None:
    """The first of these options that has no engine yet."""
    for name in NOT_YET["compress"]:
        if options[name]:
            return Missing(f"nb.compress({name}=...)", mend=f"leave {name} out")
    return None


def _backward(value: Any) -> Any:
    """None, "default", a precision's name (of what is left), or a codec that replaces all."""
    if value is None or value in ("default", "none") or isinstance(value, Codec):
        return value
    _codec("backward", value)
    return value


def _none_or_codec(option: str, value: Any) -> Codec | str:
    return "none" if value == "none" else _codec(option, value)


def _ramp(value: Any, codec: Codec | str | None) -> Any:
    """True, the bound of the next precision's error, or the precisions that come first."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if 0 < value < 1:
            return float(value)
        raise OptionError(f"ramp={value!r} is no bound", why="it bounds a relative error", mend="ramp=0.05")
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(_precision(name) for name in value)
    raise OptionError(f"ramp={value!r} is no ramp", mend='ramp=True, or ramp=["fp16", "int8"]')


def _precision(name: str) -> str:
    codec = codecs.parse(name)
    if not isinstance(codec, codecs.Precision):
        raise OptionError(f"a ramp climbs precisions, and {name!r} is none", mend='ramp=["fp16", "int8"]')
    return str(codec)


def _mask(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return values.name("mask", value)
    raise OptionError(
        f"mask={type(value).__name__} is neither True nor a name",
        why="it names the input that marks the rows which are sent, or takes the mask that Keras found",
        mend="mask=True",
    )


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{option}={value!r} is neither True nor False", mend=f"{option}=True")
    return value


def _one_of(option: str, value: Any, words: tuple[str, ...]) -> str:
    if value not in words:
        raise OptionError(f"{option}={value!r} is not known", mend=did_you_mean(str(value), words))
    return str(value)


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
    codec = _parsed(option, value) if isinstance(value, str) else value
    if isinstance(codec, codecs.Bits):
        why = "whole numbers cross in as few bits as they need by themselves"
        raise values.refuse(f"{option}={value!r} is no codec to choose", why=why, mend="leave it out")
    if isinstance(codec, Codec) and not codecs.is_built(codec):
        why = f"plans do not know {str(codec)!r}, so other processes could not read it"
        raise values.refuse(f"{option}={value!r} is not registered", why=why, mend="@nb.codec.register above its class")
    if isinstance(codec, Codec):
        return codec
    raise values.refuse(f"{option}={value!r} is no codec", mend=f"{option}=nb.codec.FP16()")


def _parsed(option: str, text: str) -> Codec:
    """What is wrong with a text is said of the option, which is what was written."""
    try:
        return codecs.parse(text, _OTHERS[option])
    except OptionError as error:
        raise OptionError(f"{option}={text!r}: {error.what}", why=error.why, mend=error.mend) from None


def _step(value: Any) -> int:
    number = values.integer("start_step", value)
    if number < 0:
        raise values.refuse(f"start_step={value!r} is before the first step", mend="start_step=0")
    return number


def _located(error: NebulaError) -> OptionError:
    """The same, and where the user wrote it."""
    return OptionError(error.what, where=str(calling_site()), why=error.why, mend=error.mend)
